"""What several targets' sessions say of each other, beyond the ratios of `report.ratios`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmux_ray.bench.load.session import Session
from pdmux_ray.metrics.goodput import RatePoint, resampled
from pdmux_ray.metrics.lifeline import quantile

# Conditions that two targets may differ in and still be compared; the second line is what `pdmux simulate` states of a server.
_MAY_DIFFER = frozenset(
    {
        *("url", "model", "each run", "rounds"),
        *("configuration", "fleet", "mode", "routing", "device", "KV pool"),
    }
)
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """A target's goodput per device over the first one's. None where the first one's is 0 or either is unknown."""

    target: str
    ratio: float | None
    ci: tuple[float, float] | None  # 95 %, of a paired bootstrap: both sides draw the same requests where they had the same

    def __str__(self) -> str:
        if self.ratio is None:
            return "no ratio: one of the two is 0 or unknown"
        interval = f"95 % interval {self.ci[0]:.2f} to {self.ci[1]:.2f}" if self.ci else "without an upper bound"
        return f"{self.ratio:.2f}×, {interval}"


def goodput_ratio(session: Session, first: Session) -> GoodputRatio:
    points, first_points = session.points(), first.points()
    rps = session.summary().goodput_rps
    first_rps = first.summary().goodput_rps
    if not points or not first_points or not first_rps:
        return GoodputRatio(session.name, None, None)
    pairs = zip(_resampled(first, first_points), _resampled(session, points), strict=True)
    drawn = sorted(ours / theirs if theirs else math.inf for theirs, ours in pairs)
    low, high = quantile(drawn, 0.025), quantile(drawn, 0.975)
    return GoodputRatio(session.name, rps / first_rps, (low, high) if math.isfinite(high) else None)


def _resampled(session: Session, points: Sequence[RatePoint]) -> list[float]:
    """Per device."""
    terms = session.terms
    return [rps / terms.devices for rps in resampled(points, terms.attainment, resamples=_RESAMPLES)]


def differences(conditions: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """What was asked of a target and not of the first one, in words. Empty: their figures compare."""
    keys = sorted((conditions.keys() | first.keys()) - _MAY_DIFFER)
    return [
        f"{key} is {conditions.get(key, 'not stated')!r}, not {first.get(key, 'not stated')!r}"
        for key in keys
        if conditions.get(key) != first.get(key)
    ]
