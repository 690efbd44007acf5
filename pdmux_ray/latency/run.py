"""A whole profile: probe, measure point after point, fit, judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.latency.design import DesignLimits, Point, design
from pdmux_ray.latency.fit import DeviceFacts, estimate, fit, qualities
from pdmux_ray.latency.identity import Identity
from pdmux_ray.latency.measure import PointBench
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.partial import Attempt, Partial
from pdmux_ray.latency.profile import FORMAT, MeasuredPoint, Probe, Profile

CALM = 0.05  # of the cores used by others: a point that was measured beside more is measured again
TRIES = 3
MOST_AGAIN_S = 180.0  # of measuring again, in all


@runtime_checkable
class Probing(Protocol):
    """A runner whose device is not this machine's cores, and which therefore measures itself what its units give."""

    def probe(self, levels: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(bytes a second, floating point operations a second), aligned with `levels`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the runner runs."""

    probe: Callable[[Sequence[int]], tuple[tuple[float, ...], tuple[float, ...]]]  # units -> bytes, operations a second
    others_s: Callable[[], float]  # CPU seconds of other programs on its cores so far
    cores: int
    clock: Clock
    tell: Callable[[float, float, str], None]  # how much of how much is done, and what was measured last


def run(
    runner: LaneRunner, limits: DesignLimits, identity: Identity, partial: Path, machine: Machine
) -> tuple[Profile, Partial]:
    """The profile, good or not: `Profile.write` judges. Interrupted, it goes on from `partial` when it is called again.

    Of a device with a single unit, which has no splits: each lane alone, and steps in one pass. Raises ConfigError when
    `partial` is of something else.
    """
    kept = Partial(partial, identity, limits)
    levels = sorted({limits.units, *(s.decode_units for s in limits.splits), *(s.prefill_units for s in limits.splits)})
    bytes_per_s, flop_per_s = machine.probe(levels)
    bench = PointBench(runner, machine.clock)
    switch_s = bench.switch_s(limits.splits[-1]) if limits.splits else 0.0
    measure_all(bench, design(limits), kept, machine)
    machine.tell(1.0, 1.0, "fitting")
    records = [record for point in sorted(kept.done) for record in kept.done[point].records]
    parameters = fit(records, DeviceFacts(runner.layers, limits.units, _rising(levels, bytes_per_s), switch_s))
    costs = FittedCosts(parameters)
    return Profile(
        format=FORMAT,
        identity=identity,
        took_s=kept.took_s,
        disturbed=sum(attempt.others > CALM for attempt in kept.done.values()) / len(kept.done),
        probe=Probe(units=tuple(levels), bytes_per_s=bytes_per_s, flop_per_s=flop_per_s),
        parameters=parameters,
        qualities=tuple(qualities(records, costs)),
        points=tuple(MeasuredPoint.of(record, *estimate(costs, record)) for record in records),
    ), kept


def measure_all(bench: PointBench, points: Sequence[Point], kept: Partial, machine: Machine) -> None:
    """Every point once, then those again that others disturbed: until all are calm, TRIES are over, or MOST_AGAIN_S."""
    done = sum(point.cost for index, point in enumerate(points) if index in kept.done)
    again_s = MOST_AGAIN_S
    for turn in range(1, TRIES + 1):
        for index in [i for i in range(len(points)) if kept.tries.get(i, 0) < turn and _disturbed(kept, i)]:
            if again_s <= 0:
                return
            attempt = _attempt(bench, points[index], machine)
            kept.add(index, attempt)
            done += points[index].cost
            again_s -= attempt.took_s * (turn > 1)
            note = points[index].label + f" (again: others used {attempt.others:.0%} of the cores)" * (turn > 1)
            left = sum(p.cost for i, p in enumerate(points) if kept.tries.get(i, 0) < TRIES and _disturbed(kept, i))
            machine.tell(done, done + left, note)


def _disturbed(kept: Partial, point: int) -> bool:
    """Others used too much of the cores, also while it was measured in the calmest attempt. Or there was none."""
    return point not in kept.done or kept.done[point].others > CALM


def _attempt(bench: PointBench, point: Point, machine: Machine) -> Attempt:
    begin_s, others_s = machine.clock.now(), machine.others_s()
    records = bench.measure(point)
    took_s = machine.clock.now() - begin_s
    others = max(machine.others_s() - others_s, 0.0) / (took_s * machine.cores)
    return Attempt(records, round(others, 4), took_s)


def _rising(levels: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """More units are never given less: noise in the probe must not look like contention."""
    return tuple((level, max(rates[: index + 1])) for index, level in enumerate(levels))
