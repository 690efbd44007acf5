"""What the time of a step depends on: the columns that `fit` weighs and `model` evaluates. Stdlib only.

A count that the hardware does not treat alike at every size (tokens in a matrix product, requests in a batch) enters as a
monotone piecewise linear curve: one non-negative slope between each two knots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from pdmux_ray.policy.views import Piece

BATCH_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
TOKEN_KNOTS = (0, 8, 32, 128, 512, 2048)

DECODE = ("weights", "context", *(f"batch over {knot}" for knot in BATCH_KNOTS))
# Of a layer, but for the last, which a whole prefill has once: the output head.
PREFILL = ("layer", "own pairs", "reused pairs", "reused", "pieces", *(f"tokens over {knot}" for knot in TOKEN_KNOTS), "head")
MIXED = ("pass", "own pairs", "reused pairs", "reused", "context", "rows", *(f"tokens over {knot}" for knot in TOKEN_KNOTS))


def ramps(count: int, knots: Sequence[int]) -> list[float]:
    """How much of `count` lies in each segment between the knots; the last one has no end."""
    inner = [float(min(max(count - low, 0), high - low)) for low, high in pairwise(knots)]
    return [*inner, float(max(count - knots[-1], 0))]


class Curve:
    """Slope times segment, summed: `sum(slopes[i] * ramps(count)[i])` in a fraction of a microsecond."""

    __slots__ = ("_knots", "_slopes", "_starts")

    def __init__(self, knots: Sequence[int], slopes: Sequence[float]) -> None:
        self._knots, self._slopes = tuple(knots), tuple(slopes)
        starts = [0.0]
        for (low, high), slope in zip(pairwise(knots), slopes, strict=False):
            starts.append(starts[-1] + slope * (high - low))
        self._starts = tuple(starts)

    def __call__(self, count: int) -> float:
        segment = bisect_right(self._knots, count) - 1
        return self._starts[segment] + self._slopes[segment] * (count - self._knots[segment])


def decode_row(batch: int, context_tokens: int) -> list[float]:
    """Aligned with DECODE."""
    return [1.0, float(context_tokens), *ramps(batch, BATCH_KNOTS)]


def pairs(pieces: Sequence[Piece]) -> tuple[int, float, int, int]:
    """New tokens; (query, key) pairs among the new tokens; pairs with reused ones; reused tokens."""
    tokens = reused = cross = 0
    own = 0.0
    for new, prior in pieces:
        tokens += new
        reused += prior
        cross += new * prior
        own += new * (new + 1) / 2
    return tokens, own, cross, reused


def prefill_row(pieces: Sequence[Piece], layers: int, last: bool) -> list[float]:
    """Aligned with PREFILL. `last`: the block ends with the model's last layer."""
    tokens, own, cross, reused = pairs(pieces)
    layer = [1.0, own, cross, reused, len(pieces), *ramps(tokens, TOKEN_KNOTS)]
    return [*(layers * value for value in layer), float(last)]


def mixed_row(batch: int, context_tokens: int, pieces: Sequence[Piece]) -> list[float]:
    """Aligned with MIXED."""
    tokens, own, cross, reused = pairs(pieces)
    return [1.0, own, cross, reused, context_tokens, batch + len(pieces), *ramps(tokens + batch, TOKEN_KNOTS)]
