"""The gated activation of the feed-forward part."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [T, 2 I] -> out [T, I]: silu(first half) * second half, in float32."""
    tokens, width = out.shape
    _silu_mul_kernel[(tokens, triton.cdiv(width, _BLOCK))](gate_up, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + token * (2 * WIDTH) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)
