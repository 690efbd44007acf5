"""Carries runs out, one at a time: offers the load, shows how far it is, hands what came back to the target's session."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import Load, Options, closed_loop, open_loop
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.session import RunRecord, Session, from_first_arrival
from pdmux_ray.bench.load.targets import TargetError, checked
from pdmux_ray.bench.timeline import MARGIN_S, Fetched, fetch, run_samples
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import RunSummary
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.series import Window

INTERRUPTED = "interrupted"
_COUNTING = {"exact": "counted by the server", "estimated": "estimated from the lengths of their texts"}
SETTLE_S = 1.0  # between runs: requests that were given up leave the server
TIMELINE_S = 5.0  # that a server has to tell its timeline after a run
BUSY_S = 10.0  # for which a server may refuse everything (429, 503) after a run without being taken for gone


@dataclass(slots=True)
class Conductor:
    """`progress` counts runs. `closed`: levels are numbers of requests in flight, not rates."""

    offer: Offer
    options: Options
    progress: Progress
    closed: bool = False
    on_timeline: Callable[[Session, Fetched, Window], None] | None = None  # of each run whose server tells its timeline
    done: float = 0.0  # runs of the whole command that are over
    _busy: bool = False  # a run may have left requests in a server

    def run(self, session: Session, target: Target, level: float, round_index: int = 0) -> RunSummary:
        """Offers one level to one target.

        Raises TargetError when the server no longer answers, KeyboardInterrupt after Ctrl-C; what there is has been written.
        """
        if self._busy:
            time.sleep(SETTLE_S)
        self._busy = True
        load = run_loop(self._load(session.name, target, level, round_index))
        self.done += 1.0
        return self._take(session, target, level, load)

    async def _load(self, name: str, target: Target, level: float, round_index: int) -> Load:
        what = f"{name}: {int(level)} at once" if self.closed else f"{name}: {figures.rate(level)} requests/s"

        def show(sent: int, done: int, planned: int) -> None:
            share = min(done / planned, 0.999)  # the end is told when it is there
            self.progress.update(self.done + share, f"{what}: {sent} of {planned} sent, {sent - done} in flight")

        if self.closed:
            asks = self.offer.asks(self.offer.count(level), level, round_index)
            return await closed_loop(target, asks, int(level), self.options, show)
        options = replace(self.options, time_limit_s=max(self.options.time_limit_s, self.offer.seconds(level) + 1.0))
        return await open_loop(target, self.offer.planned(level, round_index), options, show)

    def _take(self, session: Session, target: Target, level: float, load: Load) -> RunSummary:
        lifelines = from_first_arrival(from_first_arrival(load.lifelines)[self.offer.warmup :])
        failed = any(lifeline.ending is Ending.ERROR for lifeline in lifelines)
        gone = _gone(target) if failed and not load.interrupted else None
        if not lifelines:
            raise KeyboardInterrupt if load.interrupted else gone or TargetError("no request was sent after the warm-up.")
        invalid = INTERRUPTED if load.interrupted else f"the server went away: {gone}" if gone else load.invalid
        rate = _rate(lifelines) if self.closed else level
        for note in load.notes:
            session.note(f"{session.name}, {figures.rate(level)}{' at once' if self.closed else ' requests/s'}: {note}")
        session.note(f"{session.name}: the tokens of a chunk are {_COUNTING[load.counting]}.")
        summary = session.add(RunRecord(rate, lifelines, invalid))
        if gone is None and not load.interrupted:
            self._take_units(session, target, load)
        if load.interrupted:
            raise KeyboardInterrupt
        if gone:
            raise gone
        return summary

    def _take_units(self, session: Session, target: Target, load: Load) -> None:
        """What the server's lanes did during the run, where it tells that. A report can do without."""
        counted = sorted(load.lifelines, key=lambda lifeline: lifeline.due_s)[self.offer.warmup :]
        window = Window.of(counted)
        try:
            seconds = time.perf_counter() - window.begin_s + MARGIN_S
            fetched = fetch(target.url, seconds, target.api_key, patience_s=TIMELINE_S)
        except TargetError as error:
            session.note(f"{session.name}: the units of its lanes are not shown: {error}")
            return
        if fetched is not None:
            if self.on_timeline is not None:
                self.on_timeline(session, fetched, window)
            session.add_units(run_samples(fetched, window.begin_s, window.end_s, len(session.records) - 1))


def _gone(target: Target) -> TargetError | None:
    """Why a server whose requests failed can no longer be measured. None: it can."""
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            run_loop(checked(replace(target, dialect=None)))
        except TargetError as error:
            if time.monotonic() > end_s or not re.search("HTTP (429|503)", str(error)):
                return error
        else:
            return None
        time.sleep(SETTLE_S)


def _rate(lifelines: Sequence[Lifeline]) -> float:
    """Requests a second that a closed loop came to, from the first send to the last end."""
    ends_s = [lifeline.ended_s for lifeline in lifelines if lifeline.ended_s > lifelines[0].due_s]  # NaN: hardly begun
    return len(lifelines) / (max(ends_s) - lifelines[0].due_s) if ends_s else 0.0
