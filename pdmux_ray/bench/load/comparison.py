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
        *("configuration", "fleet", "mode", "routing", "device", "KV pool", "limits"),
    }
)
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """A target's goodput per device over the first one's. None where the first one's is 0 or either is unknown.

    `ci`: 95 %, of a paired bootstrap: both sides draw the same requests where they had the same. Where the first one does not
    even hold its lowest rate, it carries less than that, so that the ratio is at least the one to that rate, and has no upper
    end (None). None where either is unknown.
    """

    target: str
    ratio: float | None
    ci: tuple[float, float | None] | None

    def __str__(self) -> str:
        if self.ratio is None or self.ci is None:
            return "no ratio: one of the two is 0 or unknown"
        low, high = self.ci
        return f"{self.ratio:.2f}×, 95 % interval {low:.2f} {'and more' if high is None else f'to {high:.2f}'}"


def goodput_ratio(session: Session, first: Session) -> GoodputRatio:
    points, first_points = session.points(), first.points()
    if not points or not first_points:
        return GoodputRatio(session.name, None, None)
    rps, first_rps = session.summary().goodput_rps, first.summary().goodput_rps
    least_rps = min(point.rate_rps for point in first_points) / first.terms.devices
    pairs = list(zip(_resampled(first, first_points), _resampled(session, points), strict=True))
    low = quantile(sorted(ours / (theirs or least_rps) for theirs, ours in pairs), 0.025)
    high = quantile(sorted(ours / theirs if theirs else math.inf for theirs, ours in pairs), 0.975)
    ratio = rps / first_rps if first_rps else None
    return GoodputRatio(session.name, ratio, (low, high if math.isfinite(high) else None))


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
