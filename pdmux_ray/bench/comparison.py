"""Ratios between the runs of several targets. Pure.

A ratio is the target's figure over the first target's: below 1 is better for latencies, above 1 for rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmux_ray.metrics.goodput import RatePoint, resampled
from pdmux_ray.metrics.lifeline import Lifeline, quantile
from pdmux_ray.metrics.summary import Stats, Summary

# measure -> how it is got from the figures of one rate
MEASURES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "TPOT p99", "output tokens/s", "good fraction")

# Conditions that two targets may differ in and still be compared.
_OF_THE_TARGET = frozenset({"url", "model"})


@dataclass(frozen=True, slots=True)
class AtRate:
    """The figures of one target at one rate, all rounds together. Seconds; None without a sample."""

    ttft_s: Stats
    itl_s: Stats
    tpot_s: Stats
    output_tokens_per_s: float
    good_fraction: float

    def figures(self) -> dict[str, float | None]:
        """By the names of MEASURES."""
        values = (
            *(self.ttft_s.p50, self.ttft_s.p99, self.itl_s.p50, self.itl_s.p99, self.tpot_s.p50, self.tpot_s.p99),
            *(self.output_tokens_per_s, self.good_fraction),
        )
        return dict(zip(MEASURES, values, strict=True))


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """Of a target's goodput and the first one's. `ratio` and `ci` are None where the first one's is 0."""

    rps: float  # per device
    bound: str  # a `Bound` value
    ratio: float | None
    ci: tuple[float, float] | None  # 95 %


@dataclass(frozen=True, slots=True)
class Versus:
    """One target beside the first one."""

    name: str
    rates: Mapping[float, Mapping[str, float | None]]  # rate -> measure -> ratio
    goodput: GoodputRatio


def at_rate(lifelines_of_rounds: Sequence[Sequence[Lifeline]], tokens_per_s: Sequence[float], good: RatePoint) -> AtRate:
    """`tokens_per_s`: of each round."""
    lifelines = [lifeline for lifelines in lifelines_of_rounds for lifeline in lifelines]
    return AtRate(
        Stats.of([s for lifeline in lifelines if (s := lifeline.ttft_s) is not None]),
        Stats.of([gap for lifeline in lifelines for gap in lifeline.gaps_s]),
        Stats.of([s for lifeline in lifelines if (s := lifeline.tpot_s) is not None]),
        sum(tokens_per_s) / len(tokens_per_s),
        good.good_fraction,
    )


def ratios(figures: AtRate, first: AtRate) -> dict[str, float | None]:
    """Measure -> ratio; None where either has no figure or the first one's is 0."""
    return {
        measure: value / base if value is not None and base else None
        for (measure, value), base in zip(figures.figures().items(), first.figures().values(), strict=True)
    }


def goodput_ratio(
    summary: Summary, points: Sequence[RatePoint], first: Summary, first_points: Sequence[RatePoint], resamples: int = 1000
) -> GoodputRatio:
    """The interval is a paired bootstrap: both sides draw the same requests where they had the same ones."""
    if not points or not first_points or not first.goodput_rps:
        return GoodputRatio(summary.goodput_rps, summary.goodput_bound, None, None)
    drawn = sorted(
        (b / summary.devices) / (a / first.devices) if a else math.inf
        for a, b in zip(
            resampled(first_points, first.attainment, resamples=resamples),
            resampled(points, summary.attainment, resamples=resamples),
            strict=True,
        )
    )
    ratio = summary.goodput_rps / first.goodput_rps
    low, high = quantile(drawn, 0.025), quantile(drawn, 0.975)
    return GoodputRatio(summary.goodput_rps, summary.goodput_bound, ratio, (low, high) if math.isfinite(high) else None)


def differences(conditions: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """What was asked of a target and not of the first one, in words. Empty: their figures compare."""
    keys = sorted((conditions.keys() | first.keys()) - _OF_THE_TARGET)
    return [
        f"{key}: {conditions.get(key, 'not stated')} instead of {first.get(key, 'not stated')}"
        for key in keys
        if conditions.get(key) != first.get(key)
    ]
