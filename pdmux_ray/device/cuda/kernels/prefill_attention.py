"""Causal attention of several new tokens a sequence over its KV pages: cached prefix and new tokens alike.

A CTA takes a block of consecutive queries of one sequence for all query heads of one KV head: its rows are (query, head) pairs,
so that KV is read once for all of them, and short slices fill a block as well as long ones do. Blocks with the most keys to see
start first. The grid is an upper bound from shapes; a CTA finds its block from `query_starts`, or ends.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdmux_ray.device.cuda.kernels.paged import (
    LOG2_E,
    OF_SEQUENCES,
    attend,
    block_width,
    entry,
    keys_a_block,
    load_heads,
    owner_of,
)

_ROWS, _FEW_ROWS = 128, 64  # of a CTA: one or two warpgroups' matrix instructions high
_ACCUMULATOR_ELEMENTS = 128 * 128  # of a CTA, at most: what 256 threads hold without spilling


def rows_a_block(tokens: int, heads: int, head_dim: int, sms: int) -> int:
    """Rows of a CTA: many, unless that leaves SMs of the lane without work."""
    fits = _ACCUMULATOR_ELEMENTS // block_width(head_dim)
    return _ROWS if fits >= _ROWS and tokens * heads >= _ROWS * sms else _FEW_ROWS


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int | None,
    sms: int,
    max_sequences: int,
    out: Tensor,
) -> None:
    """query [T, NH D or more] (rotated) -> out [T, NH D]; the new tokens' KV is in the pages already.

    Sequence b's queries are the rows [query_starts[b], query_starts[b + 1]), its last tokens of context_lengths[b]; rows before
    query_starts[0] are left alone. keys, values [pages, KVH, page_size, D]: one layer of the pool. page_table [B, P],
    query_starts [B + 1] and context_lengths [B] int32. One kernel is compiled for all B up to `max_sequences`.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    heads, sequences = out.shape[1] // head_dim, len(context_lengths)
    group = heads // kv_heads
    rows = max(rows_a_block(len(query), heads, head_dim, sms), triton.next_power_of_2(group))
    queries_a_block = rows // group
    alone = rows > _FEW_ROWS or head_dim > 128  # the CTA takes a whole SM: with 128 threads it would spill
    _block_kernel[(len(query) // queries_a_block + sequences, kv_heads)](
        query,
        keys,
        values,
        page_table,
        query_starts,
        context_lengths,
        out,
        sequences,
        query.stride(0),
        page_table.stride(0),
        scale * LOG2_E,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_B=max(16, triton.next_power_of_2(max_sequences)),
        BLOCK_Q=queries_a_block,
        BLOCK_M=rows,
        BLOCK_N=keys_a_block(keys, most=64),
        BLOCK_D=block_width(head_dim),
        num_warps=8 if alone else 4,
        num_stages=5 if alone else 4,  # one more block of keys in flight
    )


@triton.jit(do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=OF_SEQUENCES)
def _block_kernel(
    query,
    keys,
    values,
    page_table,
    query_starts,
    context_lengths,
    out,
    sequences,
    query_stride,
    table_stride,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_B)
    starts = tl.load(query_starts + rows, mask=rows < sequences, other=0)
    counts = tl.load(query_starts + rows + 1, mask=rows < sequences, other=0) - starts
    blocks = (counts + BLOCK_Q - 1) // BLOCK_Q
    ends = tl.cumsum(blocks, 0)
    at = tl.sum(blocks, 0) - 1 - tl.program_id(0)
    if at >= 0:
        row = owner_of(at, ends)
        start = entry(starts, rows, row)
        count = entry(counts, rows, row)
        first_query = (at - entry(ends, rows, row) + entry(blocks, rows, row)) * BLOCK_Q
        length = tl.load(context_lengths + row)
        first_token = length - count + first_query  # of the block's queries; sees itself and all before it
        end_token = tl.minimum(first_token + BLOCK_Q, length)
        pages = page_table + row.to(tl.int64) * table_stride

        pairs = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        number = pairs // GROUP
        real = (pairs < BLOCK_Q * GROUP) & (first_query + number < count)
        token_row = (start + first_query + number).to(tl.int64)
        kv_head = tl.program_id(1)
        head_at = (kv_head * GROUP + pairs % GROUP) * HEAD_DIM
        queries = load_heads(query, token_row * query_stride + head_at, columns, real, HEAD_DIM, BLOCK_D)
        last = first_token + number
        k_base = keys + kv_head * (PAGE_SIZE * HEAD_DIM)
        v_base = values + kv_head * (PAGE_SIZE * HEAD_DIM)

        best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([BLOCK_M], dtype=tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(first_token - WINDOW + 1, 0) // BLOCK_N
        # Blocks that every query sees come first and need no mask; with a window they are not told apart.
        for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
            end = (end_token + BLOCK_N - 1) // BLOCK_N if MASKED else (first_token + 1) // BLOCK_N
            for block in range(begin, end):
                tokens = block * BLOCK_N + tl.arange(0, BLOCK_N)
                best, mass, total = attend(
                    queries,
                    last,
                    tokens,
                    length,
                    best,
                    mass,
                    total,
                    k_base,
                    v_base,
                    pages,
                    columns,
                    scale,
                    MASKED,
                    WINDOW,
                    KV_HEADS,
                    HEAD_DIM,
                    PAGE_SIZE,
                    BLOCK_D,
                )
            begin = end
        where = out + token_row[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head_at[:, None] + columns[None, :]
        mean = total / mass[:, None]
        tl.store(where, mean.to(out.dtype.element_ty), mask=real[:, None] & (columns < HEAD_DIM)[None, :])
