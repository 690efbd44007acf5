"""What both attention kernels are made of: work shared out among CTAs, and one step of attention over KV pages.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; over blocks of keys: Dao et al.,
"FlashAttention", 2022. Scores are kept times log2(e), so that `exp2` serves.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)

# The score of a key that a query does not see. Finite: a block in which a query sees nothing would else make NaN of
# inf - inf. What such a block adds is scaled by 2**-1e30 = 0 as soon as the query sees a key, and each sees itself.
_UNSEEN = tl.constexpr(-1.0e30)

# Arguments with an entry a sequence. A step may begin anywhere in them: were their alignment compiled in, a step of another
# mix would compile the kernel anew, amid requests.
OF_SEQUENCES = ("page_table", "query_starts", "context_lengths")

_TILE_BYTES = 16384  # of a block of keys: two CTAs with a few such blocks in flight each share an SM's memory


def block_width(head_dim: int) -> int:
    """`head_dim`, padded to what `tl.dot` and `tl.arange` take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def keys_a_block(keys: Tensor, most: int) -> int:
    """How many keys of a pool's layer are attended to at a time."""
    return max(16, min(most, _TILE_BYTES // (block_width(keys.shape[3]) * keys.element_size())))


@triton.jit
def owner_of(at, ends):
    """Work is laid end to end; `ends` says where each row's ends. The row that item `at` belongs to."""
    return tl.sum((ends <= at).to(tl.int32), 0)


@triton.jit
def entry(values, rows, row):
    """values[row] of a vector whose indices are `rows`."""
    return tl.sum(tl.where(rows == row, values, 0), 0)


@triton.jit
def load_heads(base, at, columns, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries [rows, BLOCK_D] that begin at the elements `at`; 0 where `seen` is not set, and in the padding."""
    mask = seen[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_slots(base, slots, columns, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values [slots, BLOCK_D] of one head."""
    at = base + slots[:, None] * HEAD_DIM + columns[None, :]
    return tl.load(at) if HEAD_DIM == BLOCK_D else tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend(
    queries,  # [rows, BLOCK_D]
    last,  # [rows]: the last token that each query sees: its own
    tokens,  # [keys]: which tokens of the sequence to attend to now
    length,  # of the sequence
    best,  # [rows] highest score so far, times log2(e)
    mass,  # [rows] sum of exp2(score - best)
    total,  # [rows, BLOCK_D] values, weighted alike
    keys,  # one head's, of page 0
    values,
    pages,  # the sequence's row of the page table
    columns,
    scale,  # of scores, times log2(e)
    MASKED: tl.constexpr,  # whether some query may not see some of the tokens
    WINDOW: tl.constexpr,  # a query sees so many tokens; 0: all
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of keys more: the new best, mass and total."""
    held = tokens
    if MASKED:  # tokens past the end are read as the last one, so that loads need no mask and what is stale is never read
        held = tl.minimum(tokens, length - 1)
    page = tl.load(pages + held // PAGE_SIZE).to(tl.int64)
    slots = page * (KV_HEADS * PAGE_SIZE) + held % PAGE_SIZE
    k = load_slots(keys, slots, columns, HEAD_DIM, BLOCK_D)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = tokens[None, :] <= last[:, None]
        if WINDOW > 0:
            seen = seen & (tokens[None, :] > last[:, None] - WINDOW)
        scores = tl.where(seen, scores, _UNSEEN)
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(best - higher)
    v = load_slots(values, slots, columns, HEAD_DIM, BLOCK_D)
    total = tl.dot(weights.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
    return higher, mass * fade + tl.sum(weights, 1), total
