"""Attention of one new token a sequence over its KV pages, by as many CTAs as fill the lane's SMs.

The contexts of all sequences are laid end to end in blocks of keys, and each CTA (a *share*) takes an equal run of blocks for
one KV head: long and short contexts in one batch keep every SM busy to the end. A share that meets n sequences leaves n
*pieces* (weighted mean of values, log of the mass); a second launch puts each sequence's pieces together. Shares and sequences
both come in order, so share + sequence is a different number for each piece: its place in the scratch.

All query heads of a KV head are together in one CTA: its KV is read once. How the work is cut depends on `sms`, on the batch
and on the width of the page table, never on contexts, which the CTAs read themselves.
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

_CTAS_PER_SM = 2
_KEYS_A_SHARE = 128  # at least, of the longest context: below that, putting pieces together costs more than it saves


def shares_for(sms: int, kv_heads: int, batch: int, longest: int) -> int:
    """How many shares a KV head's work is cut into. `longest`: tokens that the page table's width allows."""
    return max(1, min(_CTAS_PER_SM * sms // kv_heads, batch * longest // _KEYS_A_SHARE))


def pieces_for(sms: int, kv_heads: int, batch: int) -> int:
    """Rows of the scratch, at most, for any batch up to `batch`."""
    return max(1, _CTAS_PER_SM * sms // kv_heads) + batch


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int | None,
    sms: int,
    pieces: Tensor,
    masses: Tensor,
    out: Tensor,
) -> None:
    """query [B, NH D or more] (rotated) -> out [B, NH D]; the new tokens' KV is in the pages already.

    keys, values [pages, KVH, page_size, D]: one layer of the pool. page_table [B, P] int32; context_lengths [B] int32, none
    of them 0. Scratch: pieces [pieces_for, NH D] and masses [pieces_for, NH] float32.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    batch, heads = len(query), masses.shape[1]
    group = heads // kv_heads
    shares = shares_for(sms, kv_heads, batch, page_table.shape[1] * page_size)
    work = {
        "WINDOW": window or 0,
        "BLOCK_B": max(16, triton.next_power_of_2(batch)),
        "BLOCK_N": keys_a_block(keys, most=128),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_width(head_dim),
    }
    tensors = (query, keys, values, page_table, context_lengths, pieces, masses)
    _share_kernel[(shares, kv_heads)](
        *tensors,
        batch,
        shares,
        query.stride(0),
        page_table.stride(0),
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        **work,
        num_warps=4,
        num_stages=5,  # page numbers, then keys and values, each two blocks ahead of their use
    )
    _sum_kernel[(batch, heads)](
        pieces, masses, context_lengths, out, batch, shares, HEADS=heads, BLOCK_P=16, **work, num_warps=4
    )


@triton.jit
def _blocks_of(lengths, rows, batch, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many blocks of keys each sequence's query sees."""
    length = tl.load(lengths + rows, mask=rows < batch, other=0)
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    return (length + BLOCK_N - 1) // BLOCK_N


@triton.jit(do_not_specialize=["batch", "shares", "table_stride"], do_not_specialize_on_alignment=OF_SEQUENCES)
def _share_kernel(
    query,
    keys,
    values,
    page_table,
    context_lengths,
    pieces,
    masses,
    batch,
    shares,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    share = tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_B)
    group = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    blocks = _blocks_of(context_lengths, rows, batch, WINDOW, BLOCK_N)
    ends = tl.cumsum(blocks, 0)
    work = tl.sum(blocks, 0)
    at = share * work // shares
    share_end = (share + 1) * work // shares
    head_at = (kv_head * GROUP + group) * HEAD_DIM
    own = kv_head * (PAGE_SIZE * HEAD_DIM)
    while at < share_end:
        row = owner_of(at, ends)
        row_end = entry(ends, rows, row)
        row_start = row_end - entry(blocks, rows, row)
        stop = tl.minimum(share_end, row_end)
        length = tl.load(context_lengths + row)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
        last = tl.zeros([BLOCK_M], dtype=tl.int32) + (length - 1)
        queries = load_heads(query + row.to(tl.int64) * query_stride, head_at, columns, group < GROUP, HEAD_DIM, BLOCK_D)
        pages = page_table + row.to(tl.int64) * table_stride
        best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([BLOCK_M], dtype=tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for block in range(at - row_start, stop - row_start):
            tokens = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
            best, mass, total = attend(
                queries,
                last,
                tokens,
                length,
                best,
                mass,
                total,
                keys + own,
                values + own,
                pages,
                columns,
                scale,
                True,
                0,  # the window begins with the first block
                KV_HEADS,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_D,
            )
        piece = (share + row) * (KV_HEADS * GROUP) + kv_head * GROUP + group
        inside = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(pieces + piece[:, None] * HEAD_DIM + columns[None, :], total / mass[:, None], mask=inside)
        tl.store(masses + piece, best + tl.log2(mass), mask=group < GROUP)
        at = stop


@triton.jit(do_not_specialize=["batch", "shares"])
def _sum_kernel(
    pieces,
    masses,
    context_lengths,
    out,
    batch,
    shares,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_B)
    columns = tl.arange(0, BLOCK_D)
    blocks = _blocks_of(context_lengths, rows, batch, WINDOW, BLOCK_N)
    work = tl.sum(blocks, 0)
    row_end = entry(tl.cumsum(blocks, 0), rows, row)
    row_start = row_end - entry(blocks, rows, row)
    # The share of block b is the last one that starts at or before it: share * work // shares <= b.
    first_share = ((row_start + 1) * shares - 1) // work
    shares_end = (row_end * shares - 1) // work + 1
    best = float("-inf")
    mass = 0.0
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(first_share, shares_end, BLOCK_P):
        share = start + tl.arange(0, BLOCK_P)
        filled = (share < shares_end) & (share * work // shares < (share + 1) * work // shares)
        piece = (share + row) * HEADS + head
        masses_here = tl.load(masses + piece, mask=filled, other=float("-inf"))
        inside = filled[:, None] & (columns < HEAD_DIM)[None, :]
        values = tl.load(pieces + piece[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        higher = tl.maximum(best, tl.max(masses_here, 0))
        weights = tl.exp2(masses_here - higher)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weights[:, None] * values, 0)
        mass = mass * fade + tl.sum(weights, 0)
        best = higher
    mean = total / mass
    tl.store(out + (row * HEADS + head) * HEAD_DIM + columns, mean.to(out.dtype.element_ty), mask=columns < HEAD_DIM)
