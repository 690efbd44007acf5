"""A whole profile: probe, measure point after point, fit, judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.design import Limits, design
from pdmux_ray.latency.fit import Device, estimate, fit, qualities
from pdmux_ray.latency.identity import Identity
from pdmux_ray.latency.measure import Bench
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.partial import Partial
from pdmux_ray.latency.profile import FORMAT, MeasuredPoint, Probe, Profile

Levels = Sequence[int]
ProbeHardware = Callable[[Levels], tuple[tuple[float, ...], tuple[float, ...]]]  # bytes and operations a second
Tell = Callable[[float, float, str], None]  # how much of how much is done, and what was measured last


def run(
    runner: LaneRunner, limits: Limits, identity: Identity, probe: ProbeHardware, partial: Path, clock: Clock, tell: Tell
) -> tuple[Profile, Partial]:
    """The profile, good or not: `Profile.write` judges. Interrupted, it goes on from `partial` when it is called again.

    Raises ConfigError for a device that cannot be split, or when `partial` is of something else.
    """
    if not limits.splits:
        raise ConfigError(f"the device has {limits.units} unit: there is nothing to share, so nothing to profile")
    kept = Partial(partial, identity, limits)
    levels = sorted({limits.units, *(s.decode_units for s in limits.splits), *(s.prefill_units for s in limits.splits)})
    bytes_per_s, flop_per_s = probe(levels)
    bench = Bench(runner, clock)
    switch_s = bench.switch_s(limits.splits[-1])
    _measure(bench, limits, kept, clock, tell)
    records = [record for point in sorted(kept.done) for record in kept.done[point]]
    parameters = fit(records, Device(runner.layers, limits.units, _rising(levels, bytes_per_s), switch_s))
    costs = FittedCosts(parameters)
    return Profile(
        format=FORMAT,
        identity=identity,
        took_s=kept.took_s,
        probe=Probe(units=tuple(levels), bytes_per_s=bytes_per_s, flop_per_s=flop_per_s),
        parameters=parameters,
        qualities=tuple(qualities(records, costs)),
        points=tuple(MeasuredPoint.of(record, *estimate(costs, record)) for record in records),
    ), kept


def _measure(bench: Bench, limits: Limits, kept: Partial, clock: Clock, tell: Tell) -> None:
    points = design(limits)
    weights = [point.cost for point in points]
    total = sum(weights)
    for index, point in enumerate(points):
        if index not in kept.done:
            begin_s = clock.now()
            records = bench.measure(point)
            kept.add(index, records, clock.now() - begin_s)
        tell(sum(weights[: index + 1]), total, point.label)


def _rising(levels: Levels, rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """More units are never given less: noise in the probe must not look like contention."""
    return tuple((level, max(rates[: index + 1])) for index, level in enumerate(levels))
