"""Which rate is tried next, of a grid that all servers share, so that those who are tried at the same rate get the same load.

Pure: decides, runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP = 1.12  # from one rate of the grid to the next
BELOW, ABOVE = 0.05, 1.3  # of the rate that makes the grid: its ends, about


def rates(carried_rps: float) -> list[float]:
    """Ascending. Rounded to 3 digits, so that what is printed is what was offered."""
    found, rate = [], BELOW * carried_rps
    while rate < ABOVE * carried_rps:
        found.append(float(f"{rate:.3g}"))
        rate *= STEP
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


def probes_allowed(left_s: float, searches_left: int, probe_s: float, least: int, most: int) -> int:
    """How many runs this search gets when all that are left share the time alike."""
    fair = int(left_s / (max(1, searches_left) * probe_s))
    return min(max(fair, least), most)


def nearest(grid: Sequence[float], rate: float) -> int:
    return min(range(len(grid)), key=lambda index: abs(grid[index] - rate))
