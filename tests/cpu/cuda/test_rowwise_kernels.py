"""Norms and activations, row by row, against the reference operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import ctas_in_random_order
from torch import Tensor

from pdmux_ray.device.cuda.kernels.rms_norm import rms_norm
from pdmux_ray.device.cuda.kernels.silu_mul import silu_mul
from pdmux_ray.model.reference_ops import ReferenceOps

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PLAIN = ReferenceOps(torch.zeros(1, 2, 1, 1, 16, 16))

dtypes = st.sampled_from(list(TOLERANCE))
widths = st.sampled_from([1, 16, 56, 577, 1100])


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@settings(deadline=None)
@given(st.integers(1, 5), widths, dtypes)
def test_a_norm_is_that_of_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = noise(rows, width, dtype=dtype), noise(width, dtype=dtype, seed=1)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, 1e-5, out)
    assert_near(out, PLAIN.rms_norm(x.float(), weight.float(), 1e-5))


@settings(deadline=None)
@given(st.integers(1, 4), widths, dtypes)
def test_an_activation_is_that_of_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = noise(rows, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[-1, width - 1] = 200.0, -200.0
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    silu_mul(gate_up, out)
    assert_near(out, PLAIN.silu_mul(gate_up.float()))


def test_the_order_of_ctas_changes_no_bit() -> None:
    x, weight = noise(9, 33, dtype=torch.float32), noise(33, dtype=torch.float32)
    gate_up = noise(3, 2 * 2100, dtype=torch.float32)
    results = []
    for seed in range(2):
        with ctas_in_random_order(seed):
            normed, activated = torch.empty_like(x), torch.empty(3, 2100)
            rms_norm(x, weight, 1e-5, normed)
            silu_mul(gate_up, activated)
        results.append((normed, activated))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
