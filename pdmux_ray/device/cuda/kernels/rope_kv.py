"""Norm and rotation of queries and keys, and the write of keys and values into their pages: one pass over a step's qkv."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS_A_CTA = 8


def rope_kv(
    qkv: Tensor,
    slots: Tensor,
    angles: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    keys: Tensor,
    values: Tensor,
) -> None:
    """qkv [T, (NH + 2 KVH) D]: queries are normed and rotated in place; keys, alike, and values go into their slots.

    slots [T] int64: page * page_size + offset; a row that pads the batch has one of a page that nobody reads.
    angles [T] int64: which row of cos and sin [rows, D / 2] float32 turns each token.
    q_norm, k_norm [D]: weights of an RMS norm over each head, or both None. keys, values [pages, KVH, page_size, D].
    """
    tokens, width = qkv.shape
    _, kv_heads, page_size, head_dim = keys.shape
    heads = width // head_dim
    _rope_kernel[(tokens, triton.cdiv(heads, _HEADS_A_CTA))](
        qkv,
        slots,
        angles,
        cos,
        sin,
        q_norm,
        k_norm,
        keys,
        values,
        norm_eps,
        Q_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        NORMED=q_norm is not None,
        BLOCK_H=_HEADS_A_CTA,
        BLOCK_C=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )


@triton.jit
def _weigh(normed, q_weights, k_weights, is_query, inside, dtype: tl.constexpr):
    """`normed` [heads, columns] times the weights of queries or of keys, rounded as often as the model does."""
    for_queries = tl.load(q_weights, mask=inside, other=0.0).to(tl.float32)
    for_keys = tl.load(k_weights, mask=inside, other=0.0).to(tl.float32)
    rounded = normed.to(dtype).to(tl.float32)
    return (rounded * tl.where(is_query, for_queries, for_keys)).to(dtype).to(tl.float32)


@triton.jit
def _write(
    keys,
    values,
    slot,
    head,
    column,
    inside,
    first,
    second,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Both halves of one token's heads into its slot, where they are keys or values."""
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    is_key = (head >= Q_HEADS)[:, None] & (head < Q_HEADS + KV_HEADS)[:, None]
    kv_head = head - Q_HEADS - tl.where(head >= Q_HEADS + KV_HEADS, KV_HEADS, 0)
    page_at = (slot // PAGE_SIZE) * (KV_HEADS * PAGE_SIZE) + slot % PAGE_SIZE
    at = (page_at + kv_head * PAGE_SIZE)[:, None] * HEAD_DIM + column
    tl.store(keys + at, first, mask=inside & is_key)
    tl.store(keys + at + HEAD_DIM // 2, second, mask=inside & is_key)
    tl.store(values + at, first, mask=inside & is_value)
    tl.store(values + at + HEAD_DIM // 2, second, mask=inside & is_value)


@triton.jit
def _rope_kernel(
    qkv,
    slots,
    angles,
    cos,
    sin,
    q_norm,
    k_norm,
    keys,
    values,
    norm_eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (column < HALF)
    first_at = head[:, None] * HEAD_DIM + column
    line = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    dtype = qkv.dtype.element_ty
    first = tl.load(line + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(line + first_at + HALF, mask=inside, other=0.0).to(tl.float32)

    is_query = (head < Q_HEADS)[:, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    turned_first = first
    turned_second = second
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + norm_eps)[:, None]
        turned_first = _weigh(first * factor, q_norm + column, k_norm + column, is_query, column < HALF, dtype)
        turned_second = _weigh(second * factor, q_norm + column + HALF, k_norm + column + HALF, is_query, column < HALF, dtype)
    angle = tl.load(angles + token) * HALF
    c = tl.load(cos + angle + column, mask=column < HALF, other=0.0)
    s = tl.load(sin + angle + column, mask=column < HALF, other=0.0)
    new_first = tl.where(is_value, first, turned_first * c - turned_second * s).to(dtype)
    new_second = tl.where(is_value, second, turned_second * c + turned_first * s).to(dtype)

    tl.store(line + first_at, new_first, mask=inside & is_query)
    tl.store(line + first_at + HALF, new_second, mask=inside & is_query)
    slot = tl.load(slots + token)
    _write(keys, values, slot, head, column, inside, new_first, new_second, Q_HEADS, KV_HEADS, PAGE_SIZE, HEAD_DIM)
