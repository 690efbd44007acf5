"""Which bytes of one pool go where in another: pure arithmetic over two layouts. Knows no transport and no session.

    pool[layer][key, value][page][kv_head][slot][head_dim]
                                  └──┬──┘ └─┬─┘
                                  a head group × a slot group of one page is a descriptor

Both ends cut their pool into descriptors of equal size, on the coarsest grid that fits both. Equal pages: a descriptor is all
shared heads of a page, one run of bytes. Other page sizes: a head's slots are no longer next to the next head's, so it is one
head and as many slots as divide both page sizes. Where heads are split over instances, only those that both have count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_transfer.api import Indices, KvTransferError
from kv_transfer.layout import KVLayout

Rows = NDArray[np.uint64]

MAX_DESCRIPTORS = 2**24  # of a pool: each end holds 16 bytes of each, NIXL some 40 more


class LayoutMismatchError(KvTransferError):
    """Two pools between which KV cannot move: they are of different models, or share no head."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How a pair of pools is cut. Heads are the model's; the same on both ends."""

    first_head: int
    heads: int  # that both ends have
    group_heads: int  # of one descriptor: all of them, or 1
    group_slots: int  # of one descriptor: a page, or what divides both page sizes

    @property
    def head_groups(self) -> int:
        return self.heads // self.group_heads

    def descriptor_bytes(self, layout: KVLayout) -> int:
        """Bytes of one descriptor, in either pool."""
        return self.group_heads * self.group_slots * layout.head_dim * layout.dtype_bytes


def grid(one: KVLayout, other: KVLayout) -> Grid:
    """The coarsest grid of the two; `grid(a, b) == grid(b, a)`. Raises LayoutMismatchError, which names what differs."""
    for name in ("layers", "head_dim", "dtype_bytes"):
        if getattr(one, name) != getattr(other, name):
            raise LayoutMismatchError(
                f"{name} is {getattr(one, name)} here and {getattr(other, name)} there: both ends must run the same model "
                "with the same KV dtype"
            )
    first = max(one.first_head, other.first_head)
    heads = min(one.first_head + one.kv_heads, other.first_head + other.kv_heads) - first
    if heads < 1:
        raise LayoutMismatchError(
            f"KV heads from {one.first_head} ({one.kv_heads}) and from {other.first_head} ({other.kv_heads}) do not overlap"
        )
    slots = math.gcd(one.page_size, other.page_size)
    whole_pages = slots == one.page_size == other.page_size
    return Grid(first, heads, heads if whole_pages else 1, slots)


def misfit(layout: KVLayout, tokens: int, start: int, pages: Sequence[int], generations: Sequence[int]) -> str | None:
    """Why these pages of a pool cannot take the KV of a prompt of so many tokens from `start` on; None: they can."""
    if not 0 <= start < tokens or start % layout.page_size:
        return f"{start} of {tokens} tokens are no whole pages with something to fetch after them"
    needed = -(-(tokens - start) // layout.page_size)
    if not needed == len(pages) == len(generations) == len(set(pages)):
        return f"{len(pages)} pages are not the {needed} different ones that the tokens need"
    if not all(0 <= page < layout.pages for page in pages):
        return f"a page of {tuple(pages)} is not one of {layout.pages}"
    return None


def descriptors(layout: KVLayout, grid: Grid) -> Rows:
    """[descriptors, 2]: offset from the pool's begin and length, in bytes, in the order that `indices` counts in.

    Raises LayoutMismatchError when there are more than MAX_DESCRIPTORS.
    """
    count = layout.layers * 2 * layout.pages * grid.head_groups * (layout.page_size // grid.group_slots)
    if count > MAX_DESCRIPTORS:
        raise LayoutMismatchError(
            f"{count} descriptors of {grid.descriptor_bytes(layout)} bytes: take equal page sizes, or a smaller pool"
        )
    token_bytes = layout.head_dim * layout.dtype_bytes
    head_bytes = layout.page_size * token_bytes
    pages = np.arange(layout.layers * 2 * layout.pages, dtype=np.uint64)[:, None, None] * np.uint64(layout.page_bytes)
    first = (grid.first_head - layout.first_head) * head_bytes
    heads = np.arange(grid.head_groups, dtype=np.uint64)[:, None] * np.uint64(grid.group_heads * head_bytes) + np.uint64(first)
    slots = np.arange(layout.page_size // grid.group_slots, dtype=np.uint64) * np.uint64(grid.group_slots * token_bytes)
    offsets = (pages + heads + slots).reshape(-1)
    return np.stack([offsets, np.full_like(offsets, grid.descriptor_bytes(layout))], axis=1)


def indices(layout: KVLayout, grid: Grid, pages: Sequence[int], layers: range, tokens: range, origin: int = 0) -> Indices:
    """The descriptors that hold `tokens` (positions in the prompt) in `layers`, both of step 1.

    `pages[i]` holds the tokens from `origin + i * page_size` on; `origin` is a multiple of the page size. `tokens` begin at a
    multiple of `grid.group_slots`; slots behind their end, up to the next multiple, belong to them.
    The order depends on layers, tokens and grid alone: so index i of one end belongs to index i of the other.
    Raises ValueError when the range is not aligned so or is not in the pool and these pages.
    """
    _check(layout, grid, pages, layers, tokens, origin)
    slot_groups = layout.page_size // grid.group_slots
    groups = np.arange(tokens.start // grid.group_slots, -(-tokens.stop // grid.group_slots)) - origin // grid.group_slots
    page = np.asarray(pages, dtype=np.int64)[groups // slot_groups]
    planes = np.arange(layers.start * 2, layers.stop * 2)[:, None, None]  # of a layer's keys, of its values
    heads = np.arange(grid.head_groups)[:, None]
    index = ((planes * layout.pages + page) * grid.head_groups + heads) * slot_groups + groups % slot_groups
    return index.reshape(-1).astype(np.int32)


def deeper(layout: KVLayout, grid: Grid, index: Indices, layers: int) -> Indices:
    """The descriptors of the same tokens, so many layers further down."""
    return index + np.int32(layers * 2 * layout.pages * grid.head_groups * (layout.page_size // grid.group_slots))


def count(grid: Grid, layers: range, tokens: range) -> int:
    """How many `indices` has of these."""
    slots = grid.group_slots
    return len(layers) * 2 * grid.head_groups * (-(-tokens.stop // slots) - tokens.start // slots)


def joined(rows: Rows) -> Rows:
    """The same bytes in the same order, with what follows its predecessor in the pool as one row. At least one row."""
    ends = rows[:, 0] + rows[:, 1]
    first = np.flatnonzero(np.append(True, rows[1:, 0] != ends[:-1]))
    return np.stack([rows[first, 0], np.add.reduceat(rows[:, 1], first)], axis=1)


def _check(layout: KVLayout, grid: Grid, pages: Sequence[int], layers: range, tokens: range, origin: int) -> None:
    if layers.step != 1 or tokens.step != 1 or not 0 <= layers.start < layers.stop <= layout.layers:
        raise ValueError(f"{layers} is not a range of the {layout.layers} layers")
    if origin % layout.page_size or tokens.start % grid.group_slots:
        raise ValueError(f"{tokens} of pages that begin at {origin} is not aligned to {grid.group_slots} tokens")
    if not origin <= tokens.start < tokens.stop <= origin + len(pages) * layout.page_size:
        raise ValueError(f"{tokens} is not in {len(pages)} pages of {layout.page_size} tokens that begin at {origin}")
    if not all(0 <= page < layout.pages for page in pages):
        raise ValueError(f"a page of {list(pages)} is not one of {layout.pages}")
