"""From lifelines to the few hundred points that a chart shows of them. Pure.

Arrays are float64, in seconds; times count from the run's first planned arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdmux_ray.metrics.lifeline import Lifeline

Floats = NDArray[np.float64]

CDF_POINTS = 200
TIME_BINS = 240
GAPS_PER_BIN = 25  # at least, on average: a percentile of fewer means little
ARRIVAL_MARKS = 300
UNIT_STEPS = 400


@dataclass(frozen=True, slots=True)
class UnitsSample:
    """How the device was split from `time_s` on."""

    time_s: float  # on the clock of the run's lifelines
    prefill_units: float
    decode_units: float
    run: int = 0  # its place among the runs of its target


@dataclass(frozen=True, slots=True)
class Window:
    """A run's time on the lifelines' clock: first planned arrival to last token."""

    begin_s: float
    end_s: float

    @classmethod
    def of(cls, lifelines: Sequence[Lifeline]) -> Window:
        """Of at least one."""
        begin_s = min(lifeline.due_s for lifeline in lifelines)
        return cls(begin_s, max((life.token_s[-1] if life.token_s else life.due_s for life in lifelines), default=begin_s))

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


def ttfts(lifelines: Sequence[Lifeline]) -> Floats:
    return np.array([ttft for life in lifelines if (ttft := life.ttft_s) is not None])


def gaps(lifelines: Sequence[Lifeline], begin_s: float = 0.0) -> tuple[Floats, Floats]:
    """(when each gap ended, the gap) of all requests: the values of `Lifeline.gaps_s`."""
    times, lengths = [np.empty(0)], [np.empty(0)]
    for life in lifelines:
        if len(life.token_s) > 1:
            came_s = np.frombuffer(life.token_s)
            between = np.diff(came_s)
            times.append(came_s[1:][between > 0] - begin_s)
            lengths.append(between[between > 0])
    return np.concatenate(times), np.concatenate(lengths)


def ends(values: Floats) -> tuple[float, ...]:
    """The smallest and the largest; nothing of nothing."""
    return (float(values.min()), float(values.max())) if len(values) else ()


def quantiles(values: Floats, shares: Sequence[float]) -> list[float]:
    """Of at least one value."""
    return [float(value) for value in np.quantile(values, shares)]


def cdf(values: Floats, points: int = CDF_POINTS) -> list[tuple[float, float]]:
    """(value, share of values that are not larger), ascending. Of more than `points` values, that many order statistics:
    the tail is kept, the last one is the largest value."""
    count = len(values)
    if not count:
        return []
    if count <= points:
        ranks = np.arange(1, count + 1)
    else:
        tail = points // 4
        shares = np.concatenate([np.linspace(0, 1, points - tail), 1 - np.geomspace(0.01, 1 / count, tail)])
        ranks = np.unique(np.clip(np.ceil(shares * count).astype(int), 1, count))
    ordered = np.sort(values)
    return [(float(ordered[rank - 1]), float(rank / count)) for rank in ranks]


@dataclass(frozen=True, slots=True)
class GapBin:
    """The gaps that ended in one stretch of a run."""

    time_s: float  # its middle
    width_s: float
    p50_s: float
    p99_s: float
    max_s: float


def gap_bins(times: Floats, lengths: Floats, span_s: float, bins: int = TIME_BINS) -> list[GapBin]:
    """Equal stretches of the run, at most `bins`; those without a gap are left out."""
    if not len(lengths) or span_s <= 0:
        return []
    count = max(1, min(bins, len(lengths) // GAPS_PER_BIN))
    index = np.clip((times / span_s * count).astype(int), 0, count - 1)
    order = np.argsort(index, kind="stable")
    edges = np.searchsorted(index[order], np.arange(count + 1))
    found = []
    for i, (low, high) in enumerate(pairwise(edges)):
        if high > low:
            p50, p99, largest = np.quantile(lengths[order[low:high]], (0.5, 0.99, 1.0))
            found.append(GapBin((i + 0.5) * span_s / count, span_s / count, float(p50), float(p99), float(largest)))
    return found


def arrivals(lifelines: Sequence[Lifeline], window: Window, marks: int = ARRIVAL_MARKS) -> list[tuple[float, int]]:
    """(time, prompt tokens) of each planned arrival; of more than `marks` the sums over that many stretches of the run."""
    exact = sorted((life.due_s - window.begin_s, life.prompt_tokens) for life in lifelines)
    if len(exact) <= marks or window.span_s <= 0:
        return exact
    width_s = window.span_s / marks
    sums = [0] * marks
    for time_s, tokens in exact:
        sums[min(marks - 1, int(time_s / width_s))] += tokens
    return [((i + 0.5) * width_s, tokens) for i, tokens in enumerate(sums) if tokens]


def units(samples: Sequence[UnitsSample], window: Window, steps: int = UNIT_STEPS) -> list[UnitsSample]:
    """The `samples` of one run, the last one held until its end; of more than `steps` the means over that many stretches.
    Empty when none lies within the run."""
    inside = [
        replace(sample, time_s=sample.time_s - window.begin_s)
        for sample in sorted(samples, key=lambda sample: sample.time_s)
        if window.begin_s <= sample.time_s <= window.end_s
    ]
    if not inside:
        return []
    group = math.ceil(len(inside) / steps)
    kept = [_mean(inside[i : i + group]) for i in range(0, len(inside), group)]
    return [*kept, replace(kept[-1], time_s=window.span_s)]


def _mean(samples: Sequence[UnitsSample]) -> UnitsSample:
    """From the first one's time on."""
    prefill = sum(sample.prefill_units for sample in samples) / len(samples)
    decode = sum(sample.decode_units for sample in samples) / len(samples)
    return replace(samples[0], prefill_units=prefill, decode_units=decode)
