"""Which rate is tried next, of a grid that all share, so that those who are tried at the same rate get the same load; and
whether what came of a rate is clear.

Pure: decides, runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def ladder(low_rps: float, high_rps: float, step: float) -> list[float]:
    """From `low_rps` to below `high_rps`, each `step` times the one before, at least one. Rounded to 3 digits, so that what is
    printed is what was offered."""
    found, rate = list[float](), low_rps
    while rate < high_rps or not found:
        found.append(float(f"{rate:.3g}"))
        rate *= step
    return found


@dataclass(slots=True)
class GridSearch:
    """For the last rate that holds: strides that double from `start` on, up or down, then bisection, until the rate above the
    last that held has failed. Indices of a grid of `size` rates."""

    size: int
    start: int
    held: int | None = field(default=None, init=False)
    failed: int | None = field(default=None, init=False)
    _stride: int = field(default=1, init=False)

    def next(self) -> int | None:
        """What to try; None when the search is over."""
        if self.held is None and self.failed is None:
            return min(max(self.start, 0), self.size - 1)
        if self.failed is None:
            assert self.held is not None
            return min(self.held + self._stride, self.size - 1) if self.held < self.size - 1 else None
        if self.held is None:
            return max(self.failed - self._stride, 0) if self.failed > 0 else None
        return (self.held + self.failed) // 2 if self.failed - self.held > 1 else None

    def note(self, index: int, held: bool) -> None:
        """What became of the index that `next` gave."""
        if held:
            self.held = index
        else:
            self.failed = index
        if self.held is None or self.failed is None:
            self._stride *= 2


def clearly(good: int, count: int, attainment: float, level: float) -> bool | None:
    """Whether `good` of `count` requests are clearly enough (True), clearly too few (False), or neither (None), by exact
    one-sided binomial tests: were each request good with the chance `attainment`, 0 to 1 exclusive, a count of misses so low,
    or so high, would come with a chance of at most `level`.

    The test takes misses for independent. They are not (docs/goodput.md): one stall spoils all that it meets, so that a single
    run is wrong more often than `level` says.
    """
    misses = count - good
    if _chance_of_at_most(misses, count, 1 - attainment) <= level:
        return True
    if 1 - _chance_of_at_most(misses - 1, count, 1 - attainment) <= level:
        return False
    return None


def decisive(attainment: float, level: float) -> int:
    """The least requests that are clearly enough when all are good."""
    return math.ceil(math.log(level) / math.log(attainment))


def _chance_of_at_most(misses: int, count: int, chance: float) -> float:
    """P(X ≤ misses), X binomial."""

    def log_of(k: int) -> float:
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        return ways + k * math.log(chance) + (count - k) * math.log1p(-chance)

    return math.fsum(math.exp(log_of(k)) for k in range(misses + 1))


def nearest(grid: Sequence[float], rate: float) -> int:
    return min(range(len(grid)), key=lambda index: abs(grid[index] - rate))
