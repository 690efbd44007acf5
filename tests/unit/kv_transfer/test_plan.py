"""Every planned copy is checked against one that goes byte by byte."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.layout import KVLayout
from kv_transfer.plan import Grid, LayoutMismatchError, count, deeper, descriptors, grid, indices, joined
from tests.examples import tried

from .pools import pool_view

MODEL_HEADS = 4


@st.composite
def pairs_of_pools(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two pools of one model whose ranges of heads overlap."""
    layers, dim, size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2])))
    common = draw(st.integers(0, MODEL_HEADS - 1))

    def one() -> KVLayout:
        first = draw(st.integers(0, common))
        heads = draw(st.integers(common, MODEL_HEADS - 1)) - first + 1
        return KVLayout(layers, draw(st.integers(4, 6)), heads, draw(st.sampled_from([1, 2, 3, 4, 6, 8])), dim, size, first)

    return one(), one()


def copy(source: NDArray[np.uint8], target: NDArray[np.uint8], of: NDArray[np.uint64], to: NDArray[np.uint64]) -> None:
    """What a transport does with the descriptors at one index of both ends."""
    for (from_offset, from_length), (to_offset, to_length) in zip(of.tolist(), to.tolist(), strict=True):
        assert from_length == to_length
        target[to_offset : to_offset + to_length] = source[from_offset : from_offset + from_length]


def random_bytes(layout: KVLayout, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, layout.total_bytes, dtype=np.uint8)


@settings(max_examples=tried(60), deadline=None)
@given(pair=pairs_of_pools(), data=st.data())
def test_the_bytes_of_the_named_tokens_move_and_no_others(pair: tuple[KVLayout, KVLayout], data: st.DataObject) -> None:
    ours, theirs = pair
    cut = grid(ours, theirs)
    unit = cut.group_slots
    origin = data.draw(st.sampled_from(range(0, 3 * theirs.page_size, theirs.page_size)), "first token that the target lacks")
    room = min(theirs.page_size * theirs.pages, ours.page_size * ours.pages - origin % ours.page_size)
    first = data.draw(st.integers(0, (room - 1) // unit), "begin") * unit + origin
    tokens = range(first, data.draw(st.integers(first + 1, origin + room), "end"))
    start, stop = sorted(data.draw(st.lists(st.integers(0, ours.layers), min_size=2, max_size=2, unique=True), "layers"))
    our_origin = origin // ours.page_size * ours.page_size
    pages = tuple(data.draw(st.permutations(range(ours.pages)), "source pages"))
    their_pages = tuple(data.draw(st.permutations(range(theirs.pages)), "target pages"))
    source, target = random_bytes(ours, 1), random_bytes(theirs, 2)
    expected = target.copy()

    wanted = range(first, math.ceil(tokens.stop / unit) * unit)
    view, aim = pool_view(source, ours), pool_view(expected, theirs)
    for token in wanted:
        page, slot = divmod(token - our_origin, ours.page_size)
        to_page, to_slot = divmod(token - origin, theirs.page_size)
        for head in range(cut.first_head, cut.first_head + cut.heads):
            read = view[start:stop, :, pages[page], head - ours.first_head, slot]
            aim[start:stop, :, their_pages[to_page], head - theirs.first_head, to_slot] = read

    local = indices(ours, cut, pages, range(start, stop), tokens, our_origin)
    remote = indices(theirs, cut, their_pages, range(start, stop), tokens, origin)
    assert len(local) == len(remote) == count(cut, range(start, stop), tokens)
    from_the_top = indices(ours, cut, pages, range(stop - start), tokens, our_origin)
    assert (deeper(ours, cut, from_the_top, start) == local).all()
    copy(source, target, descriptors(ours, cut)[local], descriptors(theirs, cut)[remote])
    np.testing.assert_array_equal(target, expected)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 3))
def test_neighbours_become_one_row_and_the_bytes_stay_in_their_order(pages: list[int], size: int) -> None:
    rows = np.array([[page * size, size] for page in pages], dtype=np.uint64)
    found = joined(rows).tolist()
    assert [byte for at, length in found for byte in range(at, at + length)] == [
        byte for page in pages for byte in range(page * size, (page + 1) * size)
    ]
    assert len(found) == 1 + sum(later != before + 1 for before, later in pairwise(pages))


@given(pair=pairs_of_pools())
def test_both_ends_find_the_same_grid_and_cut_their_pools_without_overlap(pair: tuple[KVLayout, KVLayout]) -> None:
    one, other = pair
    assert grid(one, other) == grid(other, one)
    rows = descriptors(one, grid(one, other))
    offsets, lengths = np.sort(rows[:, 0]), rows[:, 1]
    assert (np.diff(offsets) >= lengths[0]).all()
    assert int(offsets[-1] + lengths[0]) <= one.total_bytes


def test_with_equal_pages_a_descriptor_is_a_whole_page_of_the_heads_that_both_have() -> None:
    whole = KVLayout(layers=2, pages=4, kv_heads=4, page_size=16, head_dim=8, dtype_bytes=2)
    half = KVLayout(layers=2, pages=9, kv_heads=2, page_size=16, head_dim=8, dtype_bytes=2, first_head=2)
    assert grid(whole, whole) == Grid(0, 4, group_heads=4, group_slots=16)
    assert descriptors(whole, grid(whole, whole))[0].tolist() == [0, whole.page_bytes]
    assert grid(whole, half) == Grid(2, 2, group_heads=2, group_slots=16)
    assert descriptors(whole, grid(whole, half))[0].tolist() == [whole.page_bytes // 2, whole.page_bytes // 2]


def test_pools_that_cannot_exchange_kv_are_told_what_differs() -> None:
    layout = KVLayout(layers=2, pages=4, kv_heads=2, page_size=16, head_dim=8, dtype_bytes=2)
    with pytest.raises(LayoutMismatchError, match="layers is 2 here and 3 there"):
        grid(layout, KVLayout(3, 4, 2, 16, 8, 2))
    with pytest.raises(LayoutMismatchError, match="dtype_bytes"):
        grid(layout, KVLayout(2, 4, 2, 16, 8, 1))
    with pytest.raises(LayoutMismatchError, match="do not overlap"):
        grid(layout, KVLayout(2, 4, 2, 16, 8, 2, first_head=2))
    with pytest.raises(LayoutMismatchError, match="descriptors"):
        descriptors(KVLayout(2**10, 2**21, 2, 16, 8, 2), grid(layout, layout))


@pytest.mark.parametrize(
    ("pages", "layers", "tokens", "origin", "wrong"),
    [
        ([0, 1], range(3), range(8), 0, "layers"),
        ([0, 1], range(1, 1), range(8), 0, "layers"),
        ([0, 1], range(2), range(2, 8), 0, "aligned"),
        ([0, 1], range(2), range(4, 8), 2, "aligned"),
        ([0, 1], range(2), range(4, 9), 0, "is not in 2 pages"),
        ([0, 1], range(2), range(4), 4, "is not in 2 pages"),
        ([0, 4], range(2), range(8), 0, "not one of 4"),
        ([0, -1], range(2), range(8), 0, "not one of 4"),
    ],
)
def test_a_range_that_is_not_in_the_pool_is_refused(
    pages: list[int], layers: range, tokens: range, origin: int, wrong: str
) -> None:
    layout = KVLayout(layers=2, pages=4, kv_heads=1, page_size=4, head_dim=8, dtype_bytes=2)
    with pytest.raises(ValueError, match=wrong):
        indices(layout, grid(layout, layout), pages, layers, tokens, origin)


def test_a_pool_of_more_descriptors_than_memory_takes_is_refused_before_any_is_made() -> None:
    large = KVLayout(layers=64, pages=2**20, kv_heads=8, page_size=16, head_dim=64, dtype_bytes=2)
    with pytest.raises(LayoutMismatchError, match="134217728 descriptors of 16384 bytes: take equal page sizes, or a smaller"):
        descriptors(large, grid(large, large))
