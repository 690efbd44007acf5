"""How long a server's steps take, as its timeline shows (`pdmux timeline URL --out FILE`).

A profile is measured with nothing else at work; where gateway, client and engine share cores, steps take longer, short ones by
more, and now more and now less. An instance that plans by a profile learns by how much (`latency.correction`), and tells it
with its timeline.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

import numpy as np

from pdmux_ray.costs import pace
from pdmux_ray.costs.device import HostTimes
from pdmux_ray.costs.pace import Pace
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency import replay
from pdmux_ray.latency.correction import KINDS, Lesson
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.nonneg import nnls
from pdmux_ray.metrics.trace import Slice, Trace, arrivals_of, slices_of
from pdmux_ray.types import Mode

LEAST_TIMES = 32  # of steps: fewer teach nothing
LEAST_LIKE = 256  # of steps of a kind, for a law of their own
_KINDS = {"decode": "decode", "block": "prefill", "pass": "mixed"}  # of a slice -> of a lesson

Where: TypeAlias = tuple[str, int | None, int | None]  # kind, units, beside; None: of all
_ANYTHING: Where = ("", None, None)


class Seen(NamedTuple):
    """A step or block of a server."""

    kind: str
    units: int
    beside: int
    begin_s: float
    end_s: float
    profiled_s: float  # what it takes by the profile
    decodes: int

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


class Law(NamedTuple):
    """A step takes `times` as long as the profile says, which is no less than that; `step_s` besides; and for each request that
    decodes `token_s`, which its new token costs those who pass it on, on the same cores."""

    times: float
    step_s: float
    token_s: float

    def of(self, profiled_s: float, decodes: int) -> float:
        """How many times as long as the profile says."""
        return self.times + (self.step_s + self.token_s * decodes) / profiled_s


@dataclass(frozen=True, slots=True)
class Learned:
    """A `StepFactors`. What was seldom seen is as slow as what is most like it: other units, anything."""

    laws: Mapping[Where, Law]
    times: int  # all that it was learned from
    single: Sequence[float]  # the mean factor of each server
    pace: Pace | None
    host: HostTimes

    def of(self, kind: str, units: int, beside: int, predicted_s: float, decodes: int) -> float:
        """How many times as long such a step takes as the profile predicts."""
        return _law(self.laws, kind, units, beside).of(predicted_s, decodes)

    def __str__(self) -> str:
        by_kind = {kind: self.laws.get((kind, None, None)) for kind in KINDS}
        words = [
            f"{kind} {law.times:.3g}, {law.step_s * 1e3:.2g} ms and {law.token_s * 1e3:.2g} ms a token"
            for kind, law in by_kind.items()
            if law
        ]
        drift = f" of {len(self.single)} servers, {min(self.single):.3g} to {max(self.single):.3g} by server"
        host = f"{self.host.step_s * 1e3:.2g} ms of the host before a step, {self.host.lanes_s * 1e3:.2g} before lanes"
        return f"{'; '.join(words)} in the mean, from {self.times:,} steps{drift}; {host}"


def read(paths: Sequence[Path], base: FittedCosts) -> Learned:
    """Of several timelines together; `base`: what is simulated. Raises ConfigError when one is none, or they teach nothing."""
    servers, waits = list[Sequence[Seen]](), list[tuple[bool, float]]()
    for path in paths:
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            for name in trace["otherData"]["instances"]:
                servers.append(_seen(trace, name, base))
                waits += pauses(trace, name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{path} is no timeline of a server ({error!r}). `pdmux timeline URL --out FILE` leaves one."
            raise ConfigError(text) from None
    lanes, steps = ([seconds for on_lanes, seconds in waits if on_lanes is wanted] for wanted in (True, False))
    host = HostTimes(fmean(steps or [0.0]), fmean(lanes or steps or [0.0]))
    return learned(servers, host, ", ".join(map(str, paths)))


def learned(servers: Sequence[Sequence[Seen]], host: HostTimes, where: str) -> Learned:
    """Of any number of instances. Raises ConfigError when there are too few times; `where` they are from is for its words."""
    times = sum(map(len, servers))
    if times < LEAST_TIMES:
        raise ConfigError(
            f"{where}: the server has learned from {times} steps, which is too few. It must plan by a profile "
            "(engine.multiplex.profile) and have served some load."
        )
    groups: dict[Where, list[Seen]] = {}
    for one in (one for server in servers for one in server):
        for at in _wheres(*one[:3]):
            groups.setdefault(at, []).append(one)
    laws = {at: fit(found) for at, found in groups.items() if at == _ANYTHING or len(found) >= LEAST_LIKE}
    records = [[_timed(one, laws) for one in server] for server in servers]
    single = [sum(one.took_s for one in server) / sum(one.profiled_s for one in server) for server in servers if server]
    return Learned(laws, times, single, pace.joined(records), host)


def fit(group: Sequence[Seen]) -> Law:
    """Least squares of the times over the profile's, which are further off for long steps."""
    profiled_s = np.array([one.profiled_s for one in group])
    terms = [profiled_s, np.ones(len(group)), np.array([float(one.decodes) for one in group])]
    over_s = np.array([one.took_s for one in group]) - profiled_s
    more, step_s, token_s = nnls(np.stack(terms, axis=1) / np.sqrt(profiled_s)[:, None], over_s / np.sqrt(profiled_s))
    return Law(1.0 + float(more), float(step_s), float(token_s))


def _timed(one: Seen, laws: Mapping[Where, Law]) -> pace.Timed:
    expected_s = one.profiled_s * _law(laws, *one[:3]).of(one.profiled_s, one.decodes)
    return pace.Timed(one.begin_s, one.end_s, one.took_s / expected_s)


def _wheres(kind: str, units: int, beside: int) -> tuple[Where, ...]:
    """The nearest first."""
    return (kind, units, beside), (kind, None, None), _ANYTHING


def _law(laws: Mapping[Where, Law], kind: str, units: int, beside: int) -> Law:
    return next(laws[where] for where in _wheres(kind, units, beside) if where in laws)


def _seen(trace: Trace, name: str, base: FittedCosts) -> Sequence[Seen]:
    """In the order in which they ended: so the server learned from them."""
    about = trace["otherData"]["instances"][name]
    lessons = [Lesson(*row) for row in about.get("lessons", ())]
    slices = [one for one in slices_of(trace, name) if one.counted and one.predicted_s] if lessons else []
    slices.sort(key=lambda one: one.begin_s + one.took_s)
    timed = list(_replayed(slices, about["units"]))
    return [
        Seen(*step[:3], one.begin_s, one.begin_s + one.took_s, profiled_s, one.decodes)
        for one, step, profiled_s in zip(slices, timed, replay.profiled_s(timed, lessons, base), strict=True)
    ]


def _replayed(slices: Iterable[Slice], units: int) -> Iterator[replay.Timed]:
    for one in slices:
        own, beside = units, 0
        if one.split is not None and one.kind != "pass" and one.mode != Mode.TIME_SHARED.value:
            prefill, decode = one.split.prefill_units, one.split.decode_units
            own, beside = (decode, prefill) if one.kind == "decode" else (prefill, decode if prefill < units else 0)
        assert one.predicted_s is not None
        yield replay.Timed(_KINDS[one.kind], own, beside, one.took_s, one.predicted_s)


def pauses(trace: Trace, name: str) -> Iterator[tuple[bool, float]]:
    """While neither lane ran and there was work, that is, amid which no request came: whether before lanes, and how long."""
    came_s, busy_s = [at_s for at_s, _ in arrivals_of(trace, name)], math.inf
    for one in sorted(slices_of(trace, name), key=lambda one: one.begin_s):
        if one.begin_s > busy_s and bisect_left(came_s, busy_s) == bisect_left(came_s, one.begin_s):
            yield one.split is not None and one.split.prefill_units > 0, one.begin_s - busy_s
        end_s = one.begin_s + one.took_s
        busy_s = end_s if busy_s == math.inf else max(busy_s, end_s)
