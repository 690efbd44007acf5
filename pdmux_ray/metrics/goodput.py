"""Which request is good, and how many of them a server can give: the one definition that the project's claims use.

Pure: stdlib only. `DEFINITION` is what reports print.
"""

from __future__ import annotations

import itertools
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
    "Errors, truncated, empty and unfinished requests are misses. Goodput is the highest offered rate (requests a second and "
    "device) up to which the stated attainment of requests is good at every measured rate, interpolated linearly to the first "
    "measured rate at which it is not. When it is not at the lowest measured rate, goodput counts as 0: nothing was shown to "
    "hold. Its 95 % interval is a bootstrap over blocks of consecutive requests."
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
    """Service level objectives of one request, in seconds; what is within them is exactly at them or faster. None: no limit.

    The TTFT limit is `ttft_s + ttft_s_per_token * prompt tokens`: a long prompt may be given longer. Raises ConfigError.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    ttft_s_per_token: float = 0.0
    itl_statistic: str = "p99"  # of the request's own gaps: a key of ITL_STATISTICS; or "mean", which is its TPOT

    def __post_init__(self) -> None:
        for name, limit_s in (("TTFT", self.ttft_limit_s(1)), ("ITL", self.itl_s)):
            if limit_s is not None and not 0 < limit_s < math.inf:
                raise ConfigError(f"The {name} SLO is {limit_s!r} s. Give seconds above 0, or leave it out for no limit.")
        if self.ttft_s_per_token < 0 or (self.ttft_s or 0) < 0 or (self.ttft_s_per_token and self.ttft_s is None):
            raise ConfigError(f"{self.ttft_s_per_token!r} s a prompt token is no addition to a TTFT SLO of {self.ttft_s!r} s.")
        if self.itl_statistic != "mean" and self.itl_statistic not in ITL_STATISTICS:
            raise ConfigError(f"ITL statistic {self.itl_statistic!r} is unknown. Use mean, {', '.join(ITL_STATISTICS)}.")

    def ttft_limit_s(self, prompt_tokens: int) -> float | None:
        return None if self.ttft_s is None else self.ttft_s + self.ttft_s_per_token * prompt_tokens

    def verdict(self, lifeline: Lifeline) -> Verdict:
        if lifeline.ending in _MISSES:
            return _MISSES[lifeline.ending]
        ttft_s, limit_s = lifeline.ttft_s, self.ttft_limit_s(lifeline.prompt_tokens)
        if ttft_s is None:  # or an empty answer, which has nothing to be late with, would be the best of all
            return Verdict.TRUNCATED
        if limit_s is not None and ttft_s > limit_s:
            return Verdict.TTFT
        itl_s = self.itl_of(lifeline)
        if self.itl_s is not None and itl_s is not None and itl_s > self.itl_s:
            return Verdict.ITL
        return Verdict.GOOD

    def itl_of(self, lifeline: Lifeline) -> float | None:
        """The statistic that is compared with `itl_s`. None without a gap."""
        if self.itl_statistic == "mean":
            return lifeline.tpot_s
        gaps_s = sorted(lifeline.gaps_s)
        return quantile(gaps_s, ITL_STATISTICS[self.itl_statistic]) if gaps_s else None


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The verdicts of the requests that were offered at one rate, in the order of their arrival. Raises ConfigError."""

    rate_rps: float  # offered
    good: Sequence[bool]

    def __post_init__(self) -> None:
        if not self.good:
            raise ConfigError(
                f"No request was sent at {self.rate_rps:g} requests/s, so there is nothing to judge. Run it longer."
            )

    @property
    def good_fraction(self) -> float:
        return sum(self.good) / len(self.good)


class Bound(Enum):
    """What a goodput figure means."""

    MEASURED = "measured"  # the attainment was lost between two measured rates
    AT_LEAST = "at_least"  # it held at every measured rate
    BELOW = "below"  # it did not hold at the lowest one: the figure is 0
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
    """See DEFINITION. At least one point, in any order, each at a rate of its own above 0; 0 < attainment ≤ 1.

    The interval is one of this very series of runs. It cannot know of what would differ between two: docs/goodput.md says how
    often it holds the true figure. Raises ConfigError.
    """
    if not 0 < attainment <= 1:
        raise ConfigError(
            f"The attainment is {attainment!r}. Give the share of requests that must be good, above 0, at most 1."
        )
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    rps, bound = _crossing(rates, [point.good_fraction for point in ordered], attainment)
    drawn = sorted(resampled(points, attainment, resamples=resamples, seed=seed))
    return Goodput(rps, (quantile(drawn, 0.025), quantile(drawn, 0.975)), bound)


def resampled(points: Sequence[RatePoint], attainment: float, *, resamples: int = 1000, seed: int = 0) -> list[float]:
    """The goodput of each bootstrap resample, requests a second. Runs of as many requests draw the same places of their order,
    at every rate, so that two servers that had the same requests can be compared resample by resample (a paired bootstrap),
    whichever rates each of them was tried at."""
    ordered = sorted(points, key=lambda point: point.rate_rps)
    rates = [point.rate_rps for point in ordered]
    drawn = zip(*(_BlockSampler(point.good).good_fractions(resamples, seed) for point in ordered), strict=True)
    return [_crossing(rates, fractions, attainment)[0] for fractions in drawn]


def fraction_ci(point: RatePoint, *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `point.good_fraction`, drawn as that of `goodput` is."""
    drawn = sorted(_BlockSampler(point.good).good_fractions(resamples, seed))
    return quantile(drawn, 0.025), quantile(drawn, 0.975)


def _crossing(rates: Sequence[float], fractions: Sequence[float], attainment: float) -> tuple[float, Bound]:
    """Where the line through the ascending points first falls below the attainment."""
    if fractions[0] < attainment:
        return 0.0, Bound.BELOW
    held_rate, held_fraction = rates[0], fractions[0]
    for rate, fraction in zip(rates, fractions, strict=True):
        if fraction < attainment:
            share = (held_fraction - attainment) / (held_fraction - fraction)
            return held_rate + (rate - held_rate) * share, Bound.MEASURED
        held_rate, held_fraction = rate, fraction
    return held_rate, Bound.AT_LEAST


class _BlockSampler:
    """Circular block bootstrap (Politis and Romano, 1992): neighbours share a queue, so they are drawn together.

    A block has √n requests, however they depend: equal counts give equal draws, and a length that is chosen from the data holds
    the true figure only a little more often (docs/goodput.md).
    """

    def __init__(self, good: Sequence[bool]) -> None:
        count = len(good)
        block = math.isqrt(count)
        upto = [0, *itertools.accumulate((*good, *good[:block]))]
        self._sums = [upto[start + block] - upto[start] for start in range(count)]  # of the block that starts there
        self._blocks = count // block
        self._drawn = self._blocks * block

    def good_fractions(self, resamples: int, seed: int) -> list[float]:
        """Of each resample."""
        rng = random.Random(seed)
        return [sum(rng.choices(self._sums, k=self._blocks)) / self._drawn for _ in range(resamples)]
