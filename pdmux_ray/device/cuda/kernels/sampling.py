"""From logits to tokens, on the device: the order and the random numbers of device/sampler.py, without sorting anything.

The tokens of a row are ordered by falling logit, equal ones by rising id; each has the mass exp((logit - best) / temperature).
Each filter keeps a prefix of that order, so all that is left of the filters is how much mass is kept, and the token is the one
at which the cumulated mass passes `uniform * kept`. What a sort would be needed for is one question: which is the highest logit
such that the tokens from there on up have more than a given mass (or number)? It is answered by bisection over the 32 bits of
a float, two bits a pass over the row, which lies in the L2 cache. A CTA has a row.

Without a filter, device/sampler.py takes the tokens after the best CANDIDATES in the order of their ids; so does this.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdmux_ray.device.sampler import CANDIDATES

_BLOCK = 4096
_WARPS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_KEY = tl.constexpr(-(2**31))
_GREATEST_STEP = tl.constexpr(2**30)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)  # the highest float32 below 1


def greedy(logits: Tensor, out: Tensor) -> None:
    """logits [N, V] -> out [N] int64: the first best token of each row."""
    rows, vocabulary = logits.shape
    _greedy_kernel[(rows,)](logits, out, logits.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_WARPS)


def draw(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor
) -> None:
    """logits [N, V] -> out [N] int64: one token a row, by the number in [0, 1) of `uniforms` [N].

    As in SamplingParams: temperature (0: the best token), top_p (1: all), min_p (0: all) float [N]; top_k (0: all) int [N].
    """
    rows, vocabulary = logits.shape
    _draw_kernel[(rows,)](
        logits,
        uniforms,
        temperature,
        top_k,
        top_p,
        min_p,
        out,
        logits.stride(0),
        vocabulary,
        CANDIDATES=CANDIDATES,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _load(row, ids, vocabulary):
    """Logits as float32; -inf past the end."""
    return tl.load(row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(logit):
    """int32 in the order of the floats."""
    bits = logit.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(row, vocabulary, BLOCK: tl.constexpr):
    """(highest logit, its first id)."""
    ids = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_ids = ids
    for start in range(0, vocabulary, BLOCK):
        logit = _load(row, start + ids, vocabulary)
        better = logit > best
        best = tl.where(better, logit, best)
        best_ids = tl.where(better, start + ids, best_ids)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, best_ids, _NO_TOKEN), 0)


@triton.jit
def _mass(logit, highest, scale):
    """scale: log2(e) / temperature."""
    return tl.exp2((logit - highest) * scale)


@triton.jit
def _measure(row, vocabulary, key, highest, scale, BLOCK: tl.constexpr):
    """(mass, number) of the tokens above `key`."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    number = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        logit = _load(row, start + tl.arange(0, BLOCK), vocabulary)
        above = _key(logit) > key
        mass += tl.where(above, _mass(logit, highest, scale), 0.0)
        number += above.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def _find(row, vocabulary, target, highest, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key such that the tokens of that key and above have more than `target` mass (COUNT: are more than that)."""
    found = _LEAST_KEY
    step = _GREATEST_STEP
    for _ in range(16):
        one = tl.zeros([BLOCK], dtype=tl.float32)
        two = tl.zeros([BLOCK], dtype=tl.float32)
        three = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logit = _load(row, ids, vocabulary)
            key = _key(logit)
            worth = (ids < vocabulary).to(tl.float32) if COUNT else _mass(logit, highest, scale)
            one += tl.where(key >= found + step, worth, 0.0)
            two += tl.where(key >= found + 2 * step, worth, 0.0)
            three += tl.where(key >= found + 3 * step, worth, 0.0)
        steps = (tl.sum(one, 0) > target).to(tl.int32) + (tl.sum(two, 0) > target).to(tl.int32)
        found += step * (steps + (tl.sum(three, 0) > target).to(tl.int32))
        step = step // 4
    return found


@triton.jit
def _scan(row, vocabulary, lowest, highest_key, target, highest, scale, BLOCK: tl.constexpr):
    """The first id at which the mass of the tokens with lowest <= key <= highest_key, cumulated by id, is more than `target`.

    The last such token where rounding leaves less.
    """
    before = 0.0
    found = _NO_TOKEN
    last = 0
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = _load(row, ids, vocabulary)
        key = _key(logit)
        chosen = (key >= lowest) & (key <= highest_key) & (ids < vocabulary)
        mass = tl.where(chosen, _mass(logit, highest, scale), 0.0)
        hits = chosen & (before + tl.cumsum(mass, 0) > target)
        found = tl.minimum(found, tl.min(tl.where(hits, ids, _NO_TOKEN), 0))
        last = tl.maximum(last, tl.max(tl.where(chosen, ids, 0), 0))
        before += tl.sum(mass, 0)
    return tl.where(found == _NO_TOKEN, last, found)


@triton.jit
def _prefix(row, vocabulary, key, target, highest, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the fewest best tokens that reach `target` mass (COUNT: number); `key` is what `_find` found for it."""
    mass, number = _measure(row, vocabulary, key, highest, scale, BLOCK)
    each = _mass(_logit(key), highest, scale)
    more = target - number if COUNT else tl.ceil((target - mass) / each)
    return mass + tl.maximum(more, 0) * each


@triton.jit
def _greedy_kernel(logits, out, stride, vocabulary, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    _, token = _best(logits + at * stride, vocabulary, BLOCK)
    tl.store(out + at, token.to(tl.int64))


@triton.jit
def _draw_kernel(
    logits,
    uniforms,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    out,
    stride,
    vocabulary,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    highest, token = _best(row, vocabulary, BLOCK)
    temperature = tl.load(temperatures + at)
    if temperature > 0:
        scale = _LOG2_E / temperature
        top_k = tl.load(top_ks + at)
        top_p = tl.load(top_ps + at)
        min_p = tl.load(min_ps + at)
        kept, _ = _measure(row, vocabulary, _LEAST_KEY, highest, scale, BLOCK)
        if (top_k > 0) & (top_k < vocabulary):
            key = _find(row, vocabulary, top_k - 0.5, highest, scale, True, BLOCK)
            kept = tl.minimum(kept, _prefix(row, vocabulary, key, top_k, highest, scale, True, BLOCK))
        if top_p < 1:
            key = _find(row, vocabulary, top_p * kept, highest, scale, False, BLOCK)
            kept = tl.minimum(kept, _prefix(row, vocabulary, key, top_p * kept, highest, scale, False, BLOCK))
        if min_p > 0:
            least = highest + temperature * tl.log(min_p)
            enough, _ = _measure(row, vocabulary, _key(least) - 1, highest, scale, BLOCK)
            kept = tl.minimum(kept, enough)
        target = tl.minimum(tl.load(uniforms + at).to(tl.float32), _BELOW_ONE) * kept
        key = _find(row, vocabulary, target, highest, scale, False, BLOCK)
        before, better = _measure(row, vocabulary, key, highest, scale, BLOCK)
        lowest = key
        if (better >= CANDIDATES) & (top_k <= 0) & (top_p >= 1) & (min_p <= 0):
            candidate = _find(row, vocabulary, CANDIDATES - 0.5, highest, scale, True, BLOCK)
            key = candidate - 1
            before, _ = _measure(row, vocabulary, key, highest, scale, BLOCK)
            lowest = _LEAST_KEY
        token = _scan(row, vocabulary, lowest, key, target - before, highest, scale, BLOCK)
    tl.store(out + at, token.to(tl.int64))
