"""Which work is measured: a grid, and random points, half of which only judge. Pure: one seed, one design."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.latency.features import BATCH_KNOTS
from pdmux_ray.latency.records import Kind, Role
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Split

MOST_LEVELS = 8  # numbers of units that are measured, of those a device can be split into
MOST_CONTEXT_TOKENS = 16_384  # of a decode batch: enough to see its slope
MOST_PROMPT_TOKENS = 2_048
PARTS = 4  # of a prefill, to see the output head apart


@dataclass(frozen=True, slots=True)
class DesignLimits:
    """What the device and the configuration allow. `splits`: the disjoint ones."""

    units: int
    splits: tuple[Split, ...]
    max_batch: int
    context_length: int
    pool_tokens: int
    page_size: int
    chunk_tokens: int  # prefill tokens of a step in one pass, at most
    max_new_tokens: int = MOST_PROMPT_TOKENS  # of a prefill that is measured; longer ones are extrapolated
    max_context_tokens: int = MOST_CONTEXT_TOKENS  # of a decode batch, likewise


@dataclass(frozen=True, slots=True)
class Point:
    """One piece of work. Decodes when `contexts` (tokens of each request) is not empty, a prefill when `pieces` is not.

    Both with a split run beside each other; `mixed`, without one, in one pass on every unit. `repeats`: times at least.
    `block_s`: how long a block should take; `blocks`: into how many the prefill is cut instead, all of which run.
    """

    kind: Kind
    role: Role
    split: Split | None
    contexts: tuple[int, ...]
    pieces: tuple[Piece, ...]
    repeats: int
    block_s: float = 0.05
    blocks: int = 0

    @property
    def cost(self) -> float:
        """About how long it takes, relative to others."""
        tokens = sum(piece.new_tokens for piece in self.pieces)
        once = 0.02 + 0.001 * len(self.contexts) + (0.001 * tokens if self.kind == "mixed" else 0.03 if tokens else 0.0)
        return once * self.repeats + 0.0003 * tokens

    @property
    def label(self) -> str:
        what = [f"decode of {len(self.contexts)}"] if self.contexts else []
        what += [f"prefill of {sum(piece.new_tokens for piece in self.pieces)} tokens"] if self.pieces else []
        return (" and " if self.split is None else " beside ").join(what)


def design(limits: DesignLimits, seed: int = 0) -> list[Point]:
    """Every point, in random order, so that a machine that slows down for a while does so for all kinds of work."""
    rng = random.Random(seed)
    splits = _spread_out(limits.splits, MOST_LEVELS - 1)
    decode_alone = [*splits, Split(0, limits.units)]
    prefill_alone = [*splits, Split(limits.units, 0)]
    both = [*splits, *(Split(split.prefill_units, limits.units) for split in splits)]  # disjoint, and capped
    points = [
        *(point for split in decode_alone for point in _decodes(limits, split, rng)),
        *(point for split in prefill_alone for point in _prefills(limits, split, rng)),
        *(point for split in both for point in _together(limits, split, rng)),
        *_mixed(limits, rng),
    ]
    rng.shuffle(points)
    return points


def _spread_out(splits: Sequence[Split], most: int) -> list[Split]:
    """At most so many of them, evenly spaced, with both ends."""
    if len(splits) <= most:
        return list(splits)
    return [splits[round(i * (len(splits) - 1) / (most - 1))] for i in range(most)]


def _decodes(limits: DesignLimits, split: Split, rng: random.Random) -> list[Point]:
    batches = sorted({*(knot for knot in BATCH_KNOTS if 0 < knot < limits.max_batch), limits.max_batch})
    grid = []
    for batch in batches:
        most = min(_context_tokens(limits) // batch, limits.context_length - 1)
        means = sorted({min(32, most), max(1, round(math.sqrt(32 * most))), most})
        grid += [Point("decode", "fit", split, (mean,) * batch, (), 16) for mean in means]
    count = 10 * _share(limits)
    drawn = [Point("decode", role, split, contexts, (), 16) for role in _RANDOM for contexts in _batches(limits, rng, count)]
    return [*grid, *drawn]


def _prefills(limits: DesignLimits, split: Split, rng: random.Random) -> list[Point]:
    room = min(limits.context_length, limits.pool_tokens) - 1
    most = min(limits.max_new_tokens, room)
    grid = [
        Point("prefill", "fit", split, (), pieces, 6)
        for new in sorted({min(new, most) for new in (8, 32, 128, 512, most)})
        for prior in sorted({min(prior, room - new) for prior in (0, 1024, 4096)})
        for pieces in [(Piece(new, prior),), *([_split_piece(new, prior, 4)] if prior == 0 and new >= 32 else [])]
    ]
    # Whole prefills cannot tell the output head, which the last block has, from the layers: parts of short ones can.
    few = sorted({min(new, most) for new in (8, 32)})
    short = [Point("prefill", "fit", split, (), (Piece(new, 0),), 24, blocks=PARTS) for new in few]
    count = 12 * _share(limits)
    drawn = [
        Point("prefill", role, split, (), pieces, 12, block_s)
        for role in _RANDOM
        for pieces, block_s in zip(_prompts(limits, rng, count, most), _spread(rng, count, 0.01, 0.15), strict=True)
    ]
    return [*grid, *short, *drawn]


def _together(limits: DesignLimits, split: Split, rng: random.Random) -> list[Point]:
    room = (limits.pool_tokens - _context_tokens(limits)) // 2
    most = min(limits.max_new_tokens, room, limits.context_length - 1)
    return [
        Point("decode", role, split, contexts, pieces, 16)
        for role, count in _TOGETHER
        for contexts, pieces in zip(_batches(limits, rng, count), _prompts(limits, rng, count, most, 16), strict=True)
    ]


def _mixed(limits: DesignLimits, rng: random.Random) -> list[Point]:
    room = min((limits.pool_tokens - _context_tokens(limits)) // 2, limits.context_length - 1)
    most = min(limits.chunk_tokens, room)
    grid = [
        Point("mixed", "fit", None, (mean,) * batch, (Piece(new, min(prior, room - new)),), 4)
        for batch in sorted({0, 1, min(8, limits.max_batch), min(32, limits.max_batch)})
        for new in sorted({min(new, most) for new in (8, 64, 256, most)})
        for mean, prior in ((32, 0), (min(512, _context_tokens(limits) // max(batch, 1)), 2048))
    ]
    drawn = [
        Point("mixed", role, None, contexts, pieces, 12)
        for role in _RANDOM
        for contexts, pieces in zip(_batches(limits, rng, 24), _prompts(limits, rng, 24, most), strict=True)
    ]
    return [*grid, *drawn]


_RANDOM: tuple[Role, Role] = ("calibrate", "test")  # what random work is for, half and half
_TOGETHER: tuple[tuple[Role, int], ...] = (("fit", 8), ("calibrate", 12), ("test", 12))  # points of a split


def _share(limits: DesignLimits) -> int:
    """How often as much random work a part gets: where a lane has no other part, few kinds of work would judge all of it."""
    return 1 if limits.splits else 3


def _context_tokens(limits: DesignLimits) -> int:
    """Of a decode batch, at most: half of the pool, but for the page that each request wastes."""
    return min(limits.max_context_tokens, max(limits.pool_tokens // 2 - limits.max_batch * limits.page_size, limits.max_batch))


def _batches(limits: DesignLimits, rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Contexts of random batches: sizes and total tokens are spread evenly over the orders of magnitude."""
    found = []
    totals = _spread(rng, count, 0.0, 1.0)
    for batch, share in zip(_spread(rng, count, 1, limits.max_batch), totals, strict=True):
        size = round(batch)
        mean = 16 * (_context_tokens(limits) / size / 16) ** share
        longest = min(limits.context_length - 1, _context_tokens(limits) // size)
        found.append(tuple(max(1, min(round(mean * rng.uniform(0.5, 1.5)), longest)) for _ in range(size)))
    return found


def _prompts(limits: DesignLimits, rng: random.Random, count: int, most: int, least: int = 8) -> list[tuple[Piece, ...]]:
    found = []
    for new, share in zip(_spread(rng, count, least, most), _spread(rng, count, 0.0, 1.0), strict=True):
        room = max(0, min(limits.context_length - 1, most + 4096, limits.pool_tokens // 3) - round(new))
        prior = round(room**share) if rng.random() < 0.5 else 0
        found.append(_split_piece(round(new), prior, rng.choice((1, 1, 1, 2, 4))))
    return found


def _split_piece(new: int, prior: int, count: int) -> tuple[Piece, ...]:
    """`count` prompts that have so many tokens together."""
    count = min(count, new)
    return tuple(Piece(new // count + (i < new % count), prior // count) for i in range(count))


def _spread(rng: random.Random, count: int, low: float, high: float) -> list[float]:
    """Latin hypercube: one value from each of `count` equal strata, in random order; on a log scale when `low` is over 0."""
    strata = [(i + rng.random()) / count for i in range(count)]
    rng.shuffle(strata)
    if low <= 0:
        return [low + (high - low) * share for share in strata]
    return [low * (high / low) ** share for share in strata]
