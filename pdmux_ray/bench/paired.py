"""Two ways of doing the same thing, measured by turns: what disturbs a machine for a while disturbs both of a pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.metrics.lifeline import quantile

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the pairs: the median, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1%} [{self.low:.0%}, {self.high:.0%}]"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The median of over[i] / under[i], with a percentile bootstrap over the pairs (Efron, 1979). Equal input, equal result.

    Raises ValueError when they are not as many of each, or none.
    """
    quotients = [one / other for one, other in zip(over, under, strict=True)]
    if not quotients:
        raise ValueError("a ratio needs one pair at least")
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(quotients, k=len(quotients))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(quotients), quantile(drawn, 0.025), quantile(drawn, 0.975))
