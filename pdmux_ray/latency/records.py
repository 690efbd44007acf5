"""What was measured: one record for each kind of work on each number of units, with every time, not only a mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdmux_ray.policy.views import Piece

Role = Literal["fit", "calibrate", "test"]  # a grid, random work, and random work that only judges the model
Kind = Literal["decode", "prefill", "mixed"]
PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Record:
    """Repeated measurements of the same work. `times_s` in the order of measuring, never empty.

    `layers` and `last` (it ends with the model's last layer) are of a prefill's block; a mixed step has all layers.
    """

    kind: Kind
    role: Role
    units: int
    beside: int  # units of the other lane, which was busy all the time; 0: it was idle
    batch: int
    context_tokens: int
    pieces: tuple[Piece, ...]
    layers: int
    last: bool
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return percentile(self.times_s, 50)


@dataclass(frozen=True, slots=True)
class Quality:
    """How the model does on records that it has not seen: of one kind of step on one part of the device."""

    part: str
    points: int
    samples: int
    median_error: float  # |predicted / measured - 1|
    p90_error: float
    coverage: float  # share of times under the bound


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two values around it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def select(records: Sequence[Record], kind: Kind, *, alone: bool | None = None) -> list[Record]:
    """Those of a kind; `alone`: with an idle (True) or a busy (False) other lane."""
    return [record for record in records if record.kind == kind and alone in (None, record.beside == 0)]
