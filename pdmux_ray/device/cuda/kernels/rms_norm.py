"""RMS norm of each token, a CTA a token.

The residual stream is summed before, in the accumulator of the product that adds to it (`CudaOps.linear`): so a norm reads the
sum once, and no kernel of its own makes it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight: x and out [T, H], weight [H]; mean of squares in float32."""
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(tokens,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = out.dtype.element_ty
    value = tl.load(x + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = (value * factor).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, (normed * weights).to(dtype), mask=inside)
