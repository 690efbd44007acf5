"""Finds the highest rate that holds, by geometric bisection. Decides which rate is tried next; runs nothing itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pdmux_ray.errors import ConfigError


@dataclass(slots=True)
class Bisection:
    """Between `low` and `high` (requests a second), until the last rate that held and the first that did not are within
    `tolerance` of each other: failed / held ≤ 1 + tolerance. The ends are tried first, so nothing is assumed of them.

    One run judges a rate, so a rate near the edge may fall on either side; the bootstrap interval of the result says how much.
    """

    low: float
    high: float
    tolerance: float = 0.1
    _held: float | None = field(default=None, init=False)
    _failed: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ConfigError(
                f"--search {self.low:g}:{self.high:g} is not a range of rates. Write LOW:HIGH with 0 < LOW < HIGH."
            )
        if not 0 < self.tolerance < math.inf:
            raise ConfigError(f"the tolerance of a search must be over 0, got {self.tolerance:g}.")

    @property
    def most_probes(self) -> int:
        """How many rates it tries at most."""
        halvings = math.log2(math.log(self.high / self.low) / math.log1p(self.tolerance))
        return 2 + max(0, math.ceil(halvings))

    def next_rate(self) -> float | None:
        """The rate to try; None when the search is over. Rounded to 4 digits, so that what is printed is what was tried."""
        if self._held is None:
            return self.low if self._failed is None else None  # not even the lowest held
        if self._failed is None:
            return self.high if self._held < self.high else None  # even the highest held
        if self._failed / self._held <= 1 + self.tolerance:
            return None
        middle = float(f"{math.sqrt(self._held * self._failed):.4g}")
        return middle if self._held < middle < self._failed else None

    def note(self, rate: float, held: bool) -> None:
        """What became of the rate that `next_rate` gave."""
        if held:
            self._held = rate
        else:
            self._failed = rate
