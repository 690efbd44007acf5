"""On which SMs a stream's kernels run: the hardware's own answer, for the acceptance check. Not in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid


def note_sms(out: Tensor) -> None:
    """out [CTAs] int32: the number of the SM that each CTA ran on. Many more CTAs than SMs, or some SMs get none."""
    _note[(len(out),)](out)


@triton.jit
def _note(out):
    tl.store(out + tl.program_id(0), smid())
