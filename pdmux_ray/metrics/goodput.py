"""Which request is good, and how many of them a server can give: the one definition that the project's claims use.

Pure: stdlib only. `DEFINITION` is what reports print.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.lifeline import Ending, Lifeline, quantile

DEFINITION = (
    "A request is good when it is complete, its TTFT is within the TTFT SLO and the stated statistic of its ITLs is within the "
    "ITL SLO, both at once. TTFT counts from the planned arrival; an ITL is the gap between two arrivals of tokens. "
    "Errors, truncated and unfinished requests are misses. Goodput is the highest offered rate (requests a second and device) "
    "up to which the stated attainment of requests is good at every measured rate, interpolated linearly to the first measured "
    "rate at which it is not. Its 95 % interval is a bootstrap over blocks of consecutive requests."
)

ITL_STATISTICS: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


class Verdict(Enum):
    """Why a request is or is not good. The first that holds, in this order."""

    ERROR = "error"
    TRUNCATED = "truncated"
    UNFINISHED = "unfinished"
    TTFT = "ttft"
    ITL = "itl"
    GOOD = "good"


_MISSES = {Ending.ERROR: Verdict.ERROR, Ending.TRUNCATED: Verdict.TRUNCATED, Ending.UNFINISHED: Verdict.UNFINISHED}


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives of one request, in seconds. None: no limit.

    The TTFT limit is `ttft_s + ttft_s_per_token * prompt tokens`: a long prompt may be given longer.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    ttft_s_per_token: float = 0.0
    itl_statistic: str = "p99"  # of the request's own gaps; a key of ITL_STATISTICS or "mean"

    def __post_init__(self) -> None:
        if self.itl_statistic != "mean" and self.itl_statistic not in ITL_STATISTICS:
            raise ConfigError(f"ITL statistic {self.itl_statistic!r} is unknown. Use mean, {', '.join(ITL_STATISTICS)}.")

    def ttft_limit_s(self, prompt_tokens: int) -> float | None:
        return None if self.ttft_s is None else self.ttft_s + self.ttft_s_per_token * prompt_tokens

    def verdict(self, lifeline: Lifeline) -> Verdict:
        if lifeline.ending in _MISSES:
            return _MISSES[lifeline.ending]
        ttft_s, limit_s = lifeline.ttft_s, self.ttft_limit_s(lifeline.prompt_tokens)
        if limit_s is not None and ttft_s is not None and ttft_s > limit_s:
            return Verdict.TTFT
        itl_s = self.itl_of(lifeline)
        if self.itl_s is not None and itl_s is not None and itl_s > self.itl_s:
            return Verdict.ITL
        return Verdict.GOOD

    def itl_of(self, lifeline: Lifeline) -> float | None:
        """The statistic that is compared with `itl_s`. None with fewer than two tokens."""
        if self.itl_statistic == "mean":
            return lifeline.tpot_s
        gaps_s = sorted(lifeline.gaps_s)
        return quantile(gaps_s, ITL_STATISTICS[self.itl_statistic]) if gaps_s else None


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The verdicts of the requests that were offered at one rate, in the order of their arrival."""

    rate_rps: float  # offered
    good: Sequence[bool]

    @property
    def good_fraction(self) -> float:
        return sum(self.good) / len(self.good)


class Bound(Enum):
    """What a goodput figure means."""

    MEASURED = "measured"  # the attainment was lost between two measured rates
    AT_LEAST = "at_least"  # it held at every measured rate
    BELOW = "below"  # it did not hold at the lowest one: the figure is interpolated from (0 rps, all good)
    UNKNOWN = "unknown"  # no valid measurement


@dataclass(frozen=True, slots=True)
class Goodput:
    rps: float  # requests a second, all devices together
    ci: tuple[float, float]  # 95 % interval
    bound: Bound

    @classmethod
    def unknown(cls) -> Goodput:
        return cls(0.0, (0.0, 0.0), Bound.UNKNOWN)


def goodput(points: Sequence[RatePoint], attainment: float, *, resamples: int = 1000, seed: int = 0) -> Goodput:
    """See DEFINITION. `points` at different rates, in any order, each with at least one request; 0 < attainment ≤ 1."""
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    rps, bound = _crossing(rates, [point.good_fraction for point in ordered], attainment)
    drawn = sorted(resampled(points, attainment, resamples=resamples, seed=seed))
    return Goodput(rps, (quantile(drawn, 0.025), quantile(drawn, 0.975)), bound)


def resampled(points: Sequence[RatePoint], attainment: float, *, resamples: int = 1000, seed: int = 0) -> list[float]:
    """The goodput of each bootstrap resample, requests a second. Equal seeds and counts draw the same places of the order, so
    that two servers that had the same requests can be compared resample by resample (a paired bootstrap)."""
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    rng = random.Random(seed)
    samplers = [_BlockSampler(point.good) for point in ordered]
    return [_crossing(rates, [sampler.good_fraction(rng) for sampler in samplers], attainment)[0] for _ in range(resamples)]


def fraction_ci(point: RatePoint, *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `point.good_fraction`, drawn as that of `goodput` is. At least one request."""
    rng, sampler = random.Random(seed), _BlockSampler(point.good)
    drawn = sorted(sampler.good_fraction(rng) for _ in range(resamples))
    return quantile(drawn, 0.025), quantile(drawn, 0.975)


def _crossing(rates: Sequence[float], fractions: Sequence[float], attainment: float) -> tuple[float, Bound]:
    held_rate, held_fraction = 0.0, 1.0
    for index, (rate, fraction) in enumerate(zip(rates, fractions, strict=True)):
        if fraction < attainment:
            share = (held_fraction - attainment) / (held_fraction - fraction)
            return held_rate + (rate - held_rate) * share, Bound.MEASURED if index else Bound.BELOW
        held_rate, held_fraction = rate, fraction
    return held_rate, Bound.AT_LEAST


class _BlockSampler:
    """Circular block bootstrap (Politis and Romano, 1992): neighbours share a queue, so they are drawn together."""

    def __init__(self, good: Sequence[bool]) -> None:
        self._count = len(good)
        self._block = max(1, math.isqrt(self._count))
        self._sums: list[int] = [0]  # of the sequence and its first block again
        for value in (*good, *good[: self._block]):
            self._sums.append(self._sums[-1] + value)

    def good_fraction(self, rng: random.Random) -> float:
        """Of one resample."""
        blocks = -(-self._count // self._block)
        starts = [rng.randrange(self._count) for _ in range(blocks)]
        drawn: int = sum(self._sums[start + self._block] - self._sums[start] for start in starts)
        return drawn / (blocks * self._block)
