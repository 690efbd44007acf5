"""Servers under the same load: what they carry within one SLO.

    yardstick (idle: the SLO; in a closed loop: the rates) ──► each round, each server, each shape: search the rates, or all
                                                          or ──► together: each shape, each round, each rate: each server

One server is up at a time, since an idle one still takes CPU; or, `together`, all are, and take turns of one run each: where a
machine's speed drifts by more than the servers differ, only runs that follow each other can be compared.

A search runs a rate again, with other prompts, while all its runs together do not say clearly whether it holds. The nth run at
a rate is the same for every server. The order of the servers turns round from round to round, since a machine's speed drifts. A
server that cannot be started or measured is noted, and the others go on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import bound
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.conductor import Conductor
from pdmux_ray.bench.load.generator import Options, closed_loop
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.load.job import SAMPLE
from pdmux_ray.bench.load.offer import Offer, Terms
from pdmux_ray.bench.load.outcome import Outcome, reserve
from pdmux_ray.bench.load.provenance import provenance
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.scaled_work import MAX_CONTEXT
from pdmux_ray.bench.settings import START_S, YARDSTICK, served, start_s
from pdmux_ray.bench.study_rates import ABOVE, LEVEL, rates
from pdmux_ray.bench.timeline import Fetched
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.series import Window
from pdmux_ray.report.table import print_line
from pdmux_ray.tune import grid
from pdmux_ray.workload.requests import Workload

ATTAINMENT = 0.9
CALIBRATION_CONCURRENCY = 8
CALIBRATION_S = 12.0  # of a shape, for the forecast
LEAST_SECONDS, MOST_SECONDS = 4.0, 25.0  # of arrivals of a run
REQUESTS = 40  # that a run has at least, where MOST_SECONDS allow them
LEAST_RPS = grid.decisive(ATTAINMENT, LEVEL) / MOST_SECONDS  # at a lower rate one run cannot show that it holds
LEAST_PROBES = 2  # rates that a search tries, whatever the time
MOST_RUNS = 3  # of a rate in one search
USUAL_RUNS = 5  # of a search
LAST_TIMELINE = "timeline.json"  # of a server's last run: what it has learned, for `pdmux simulate --learned`
FIRST_GUESS = 0.7  # of what the yardstick carries: a rate that is too high costs less time than one that is too low


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. A run has at least `requests` and `seconds` of arrivals, but no more than MOST_SECONDS because of
    the requests."""

    rounds: int
    seconds: float
    requests: int = REQUESTS
    drain_s: float = 8.0
    shares: Sequence[float] = ()  # the rates, as shares of what the yardstick carries; empty: they are searched
    together: bool = False  # all servers are up, and take turns; the rates are `shares`

    def seconds_at(self, rate: float) -> float:
        """Of arrivals of a run."""
        return max(self.seconds, min(self.requests / rate, MOST_SECONDS))

    def run_s(self, rate: float) -> float:
        """About, of one run: it seldom needs its whole drain."""
        return self.seconds_at(rate) + self._overhead_s

    @property
    def _overhead_s(self) -> float:
        return self.drain_s / 3 + 1.0

    @property
    def usual_runs(self) -> int:
        """Of one server on one shape in one round."""
        return len(self.shares) or USUAL_RUNS

    @classmethod
    def within(
        cls,
        minutes: float,
        rounds: int,
        names: Sequence[str],
        shapes: int,
        requests: int = REQUESTS,
        shares: Sequence[float] = (),
        together: bool = False,
    ) -> Extent:
        """Searches, or runs at the shares, that take about so long in all, if the rates allow it."""
        whole = cls(rounds, 0.0, requests, shares=shares, together=together)
        left_s = minutes * 60 - whole.before_s(names, shapes)
        a_run_s = left_s / (rounds * len(names) * shapes * whole.usual_runs) - whole._overhead_s
        return replace(whole, seconds=float(f"{min(max(a_run_s, LEAST_SECONDS), MOST_SECONDS):.2g}"))

    def before_s(self, names: Sequence[str], shapes: int) -> float:
        """About, of the yardstick and of starting all servers."""
        return START_S + shapes * CALIBRATION_S + (1 if self.together else self.rounds) * start_s(names)

    def slowest_s(self, names: Sequence[str], shapes: int) -> float:
        """About, were all rates the lowest of a grid, and no search tried more than it must: what no deadline shortens."""
        runs = self.rounds * len(names) * shapes * (len(self.shares) or LEAST_PROBES)
        return self.before_s(names, shapes) + runs * self.run_s(LEAST_RPS)


def read_shares(text: str) -> tuple[float, ...]:
    """Of a list with commas, ascending. Raises ConfigError."""
    try:
        shares = tuple(sorted({float(share) for share in text.split(",")}))
    except ValueError:
        shares = ()
    if not shares or not 0 < shares[0] <= shares[-1] <= ABOVE:
        raise ConfigError(f"--shares {text!r}: they are numbers over 0 and at most {ABOVE:g}, such as 0.4,0.7.")
    return shares


@dataclass(slots=True)
class Shape:
    """One kind of work and what was measured with it."""

    workload: Workload
    offer: Offer
    directory: Path
    rates: list[float] = field(default_factory=list)
    guess: int = 0  # index of the rate at which the search of a server begins of which no rate is known to hold
    sessions: dict[str, Session] = field(default_factory=dict)


@dataclass(slots=True)
class Study:
    """`names`: of the servers, in the order of the tables."""

    names: Sequence[str]
    command: Callable[[str, Slo | None], str]  # of a server, for the objectives; the yardstick's sets them, and has none
    model: Path
    extent: Extent
    shapes: Sequence[Shape]
    slo: str  # as on the command line
    seed: int
    console: Console
    deadline_s: float  # on time.monotonic: searches try fewer rates, and try them less often, so that it is met
    serve: Callable[[str, Path], AbstractContextManager[Target]] = served
    yardstick: str = YARDSTICK
    terms: Terms | None = None
    _searches_left: int = 0
    _round: int = 0
    _runs_done: float = 0.0  # or not needed

    def describe(self) -> None:
        """What will be done, and how long it takes."""
        extent = self.extent
        how = "together, in turns" if self.extent.together else "one at a time"
        self._print(f"{len(self.names)} servers, {how}: {', '.join(self.names)}")
        for shape in self.shapes:
            for line in (shape.workload.name, *(f"  {text}" for text in shape.workload.description)):
                self._print(line)
        how = f"{len(extent.shares)} rates" if extent.shares else "rates are searched, an unclear one is run again"
        most_s = max(self.deadline_s - time.monotonic(), extent.slowest_s(self.names, len(self.shapes)))
        self._print(
            f"each on each: {how}; a run: {self._a_run}; {extent.rounds} round(s); SLO {self.slo} of an idle {self.yardstick}; "
            f"at most about {most_s / 60:.0f} minutes"
        )

    @property
    def _a_run(self) -> str:
        extent = self.extent
        return f"{extent.seconds:g} s of arrivals, or up to {MOST_SECONDS:g} s until there are {extent.requests}"

    def carry_out(self, outcome: Outcome) -> None:
        """Raises what ends it early; the sessions have what there is."""
        searches = self.extent.rounds * len(self.names) * len(self.shapes)
        self._searches_left = searches
        self._measure_yardstick()
        with Progress(searches * self.extent.usual_runs, self.console) as progress:
            if self.extent.together:
                self._take_turns(outcome, progress)
                return
            for round_index in range(self.extent.rounds):
                self._round = round_index
                for name in list(self.names)[:: -1 if self._round % 2 else 1]:
                    try:
                        self._measure(name, outcome, progress)
                    except PdmuxError as error:
                        outcome.stop(f"{name} was not measured to the end: {error}")

    def _measure_yardstick(self) -> None:
        about_s = START_S + len(self.shapes) * CALIBRATION_S
        self._print(f"starting {self.yardstick}, idle, to set the SLO and the rates: about {about_s:.0f} s")
        with self.serve(self.command(self.yardstick, None), self.model) as target:
            asks = [ask for shape in self.shapes for ask in shape.workload.asks(SAMPLE, self.seed)]
            solo = run_loop(targets.measure_solo(target, targets.plan_solo(asks, TOKEN_IDS, MAX_CONTEXT)))
            self.terms = Terms(SloText.parse(self.slo).resolve(solo), ATTAINMENT)
            self._print(f"{solo}; SLO: {figures.slo(self.terms.slo)}")
            for shape in self.shapes:
                offer = replace(shape.offer, requests=3 * CALIBRATION_CONCURRENCY, duration_s=None)
                run_loop(saturate(target, replace(offer, requests=2), level=0.5))  # warms up
                carried_rps = run_loop(saturate(target, offer, level=1.0))
                self._set_rates(shape, carried_rps)

    def _set_rates(self, shape: Shape, carried_rps: float) -> None:
        if shares := self.extent.shares:
            shape.rates = [float(f"{carried_rps * share:.2g}") for share in shares]
        else:
            shape.rates = rates(carried_rps, LEAST_RPS)
            shape.guess = grid.nearest(shape.rates, FIRST_GUESS * carried_rps)
        self._print(
            f"{shape.workload.name}: {carried_rps:.2g} requests/s with {CALIBRATION_CONCURRENCY} at once; rates from "
            f"{figures.rate(shape.rates[0])} to {figures.rate(shape.rates[-1])}"
        )

    def _measure(self, name: str, outcome: Outcome, progress: Progress) -> None:
        assert self.terms is not None
        text = self.command(name, self.terms.slo)
        with self.serve(text, self.model) as target:
            for shape in self.shapes:
                holds = self._ready(shape, name, text, target, outcome, progress)
                done = self._runs_done + self.extent.usual_runs
                if self.extent.shares:
                    for rate in shape.rates:
                        holds(rate, -math.inf)
                else:
                    self._search(shape, name, holds)
                self._searches_left -= 1
                self._runs_done = done

    def _take_turns(self, outcome: Outcome, progress: Progress) -> None:
        """A server that cannot be started is noted; one that cannot be measured ends the study."""
        assert self.terms is not None
        with ExitStack() as stack:
            up = []
            for name in self.names:
                text = self.command(name, self.terms.slo)
                try:
                    up.append((name, text, stack.enter_context(self.serve(text, self.model))))
                except PdmuxError as error:
                    outcome.stop(f"{name} was not measured: {error}")
            try:
                for shape in self.shapes:
                    takers = [self._ready(shape, *server, outcome, progress) for server in up]
                    for turn, rate in enumerate(list(shape.rates) * self.extent.rounds):
                        for holds in takers[:: -1 if turn % 2 else 1]:
                            holds(rate, -math.inf)
                            self._runs_done += 1.0
            except PdmuxError as error:
                outcome.stop(f"the turns were not measured to the end: {error}")

    def _ready(
        self, shape: Shape, name: str, text: str, target: Target, outcome: Outcome, progress: Progress
    ) -> Callable[[float, float], bool]:
        """Warms the server up with the shape. What it is then asked is `_holds`."""
        session = self._session(shape, name, text, target, outcome)
        offer = replace(shape.offer, requests=2, duration_s=None)
        run_loop(saturate(target, offer, level=0.5 + self._round))
        conductor = Conductor(shape.offer, Options(drain_s=self.extent.drain_s), progress, on_timeline=_keep_steps)
        return partial(self._holds, conductor, session, target)

    def _search(self, shape: Shape, name: str, holds: Callable[[float, float], bool]) -> None:
        """All searches that are left share the time alike."""
        points = shape.sessions[name].points()
        known = max((p.rate_rps for p in points if p.good_fraction >= ATTAINMENT), default=None)
        start = shape.guess if known is None else shape.rates.index(known)
        search = grid.GridSearch(len(shape.rates), start)
        now_s = time.monotonic()
        until_s = now_s + (self.deadline_s - now_s - start_s(self._names_left(name))) / self._searches_left
        tried = 0
        while (index := search.next()) is not None:
            rate = shape.rates[index]
            if tried >= LEAST_PROBES and time.monotonic() + self.extent.run_s(rate) > until_s:
                break
            search.note(index, holds(rate, until_s))
            tried += 1

    def _names_left(self, name: str) -> Sequence[str]:
        """That are still to be started, this one aside."""
        order = list(self.names)[:: -1 if self._round % 2 else 1]
        rounds_left = self.extent.rounds - self._round - 1
        return [*order[order.index(name) + 1 :], *(list(self.names) * rounds_left)]

    def _holds(self, conductor: Conductor, session: Session, target: Target, rate: float, until_s: float) -> bool:
        """Whether the rate holds, all its runs together. It is run again while a run is invalid (something else wanted the
        cores), and while the result is unclear and there is time."""
        run_s = self.extent.run_s(rate)
        conductor.done = max(conductor.done, self._runs_done)
        most_done = self._runs_done + (1.0 if self.extent.together else self.extent.usual_runs) - 1.0
        conductor.offer = replace(conductor.offer, duration_s=self.extent.seconds_at(rate))
        for _ in range(MOST_RUNS):
            conductor.done = min(conductor.done, most_done)
            earlier = sum(record.rate == rate for record in session.records)
            summary = conductor.run(session, target, rate, earlier)
            good = next((point.good for point in session.points() if point.rate_rps == rate), ())
            clear = grid.clearly(sum(good), len(good), ATTAINMENT, LEVEL) is not None
            if not summary.invalid and (clear or time.monotonic() + run_s > until_s):
                break
        share = sum(good) / len(good) if good else summary.good_fraction
        return share >= ATTAINMENT

    def _session(self, shape: Shape, name: str, text: str, target: Target, outcome: Outcome) -> Session:
        if name not in shape.sessions:
            assert self.terms is not None
            conditions = {
                "url": text,
                "model": target.model,
                "workload": shape.workload.name,
                "load": f"open loop, {shape.offer.arrivals} arrivals",
                "each run": self._a_run,
                "rounds": str(self.extent.rounds),
                "seed": str(self.seed),
            }
            session = Session(name, shape.directory / name, self.terms, conditions)
            session.notes += [*shape.workload.description, *provenance()]
            shape.sessions[name] = session
            outcome.sessions.append(session)
        return shape.sessions[name]

    def _print(self, text: str) -> None:
        print_line(self.console, text)


def _keep_steps(session: Session, fetched: Fetched, window: Window) -> None:
    bound.append(session.directory, bound.steps_of(fetched, window.begin_s))
    (session.directory / LAST_TIMELINE).write_text(json.dumps(fetched.trace, separators=(",", ":")), encoding="utf-8")


async def saturate(target: Target, offer: Offer, level: float) -> float:
    """Requests a second in a closed loop. `level` only makes its prompts others than those of any run."""
    asks = offer.asks(offer.count(level), level, -1)
    load = await closed_loop(target, asks, CALIBRATION_CONCURRENCY, Options(), lambda sent, done, planned: None)
    if load.interrupted:
        raise KeyboardInterrupt
    failed = [lifeline for lifeline in load.lifelines if not lifeline.token_s]
    if failed:
        raise PdmuxError(f"{target.url} failed {len(failed)} of {len(asks)} requests when it was tried: {failed[0].error}")
    end_s = max(lifeline.ended_s for lifeline in load.lifelines)
    return len(asks) / (end_s - load.lifelines[0].due_s)


def measured_sessions(shape: Shape, names: Sequence[str]) -> Iterator[Session]:
    """In the order of `names`."""
    for name in names:
        if name in shape.sessions and shape.sessions[name].records:
            yield shape.sessions[name]


def reserve_all(directories: Sequence[Path], force: bool) -> None:
    """Makes them all, without results of an earlier run. Raises ConfigError."""
    for directory in directories:
        reserve(directory, force)
        for name in (bound.FILE, LAST_TIMELINE):
            (directory / name).unlink(missing_ok=True)
