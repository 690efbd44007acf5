"""Attention over pages, with everything before it (norm, RoPE, KV write), against the reference operations in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import ctas_in_random_order
from torch import Tensor

from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.model.rope import Rope, RopeSpec
from tests.examples import tried

pytestmark = pytest.mark.cpu

# Of values around 1: float32 by sums in another order, the others by rounding of inputs, keys and probabilities.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)

SHAPES = {
    "decode": Shape(6, 2, 64, (1, 1, 1), (300, 5, 64)),
    "decode of one token": Shape(4, 4, 16, (1,), (1,)),
    "decode with a window": Shape(8, 2, 32, (1, 1), (200, 9), window=70, qk_norm=True),
    "prefill": Shape(4, 2, 64, (90,), (90,)),
    "prefill after a cached prefix, beside decodes": Shape(9, 3, 16, (1, 40, 1, 33), (17, 150, 129, 49)),
    "window shorter than a page": Shape(8, 1, 48, (20, 1), (70, 31), window=11),
    "many query heads a kv head, odd head, odd page": Shape(40, 1, 20, (5, 1), (83, 22), page_size=5, qk_norm=True),
    "widest head": Shape(2, 1, 256, (9,), (80,)),
}


class Stale(Scratch):
    """Its buffers begin with what must not be read."""

    def _make(self, *size: Any) -> Tensor:
        return super()._make(*size).fill_(torch.nan)


def ops_of(sms: int, tokens: int = 256) -> Callable[[Tensor], CudaOps]:
    return lambda pool: CudaOps(pool, Stale("cpu", pool.dtype, tokens), sms)


def assert_right(case: Case, sms: int) -> None:
    expected, expected_pool = case.reference()
    out, pool = case.run(ops_of(sms))
    tolerance = TOLERANCE[case.qkv.dtype]
    assert out.dtype == case.qkv.dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(pool.float(), expected_pool, atol=tolerance, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_and_the_written_kv_are_those_of_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    assert_right(shape.case(dtype), sms=20)


@st.composite
def steps(draw: st.DrawFn) -> Shape:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 2), (1, 17), (2, 1)]))
    sequences = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 150)), min_size=1, max_size=4))
    decodes = draw(st.booleans())
    queries = tuple(1 if decodes else count for count, _ in sequences)
    contexts = tuple(cached + count for (_, cached), count in zip(sequences, queries, strict=True))
    return Shape(
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([16, 24, 64])),
        queries,
        contexts,
        window=draw(st.none() | st.integers(1, 100)),
        qk_norm=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 4, 16, 48])),
    )


@settings(max_examples=tried(36), deadline=None)
@given(shape=steps(), dtype=st.sampled_from(DTYPES), sms=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_step_on_any_lane_gives_what_the_reference_gives(shape: Shape, dtype: torch.dtype, sms: int, seed: int) -> None:
    assert_right(shape.case(dtype, seed), sms)


@settings(max_examples=tried(9), deadline=None)
@given(shape=steps(), sms=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_order_of_ctas_changes_no_bit(shape: Shape, sms: int, seed: int) -> None:
    """No CTA waits for another, or reads what another writes: see the contract in kernels/__init__.py."""
    case = shape.case(torch.float32, seed)
    out, pool = case.run(ops_of(sms))
    with ctas_in_random_order(seed):
        shuffled, shuffled_pool = case.run(ops_of(sms))
    assert torch.equal(shuffled, out)
    assert torch.equal(shuffled_pool.nan_to_num(), pool.nan_to_num())


def test_decodes_beside_prefills_are_split_over_the_lane_as_decodes_alone_are() -> None:
    case = Shape(6, 2, 16, (1, 1, 30), (290, 70, 90)).case(torch.float32)
    case.batch = replace(case.batch, decodes=2)
    assert_right(case, sms=20)
    together, _ = case.run(ops_of(20))
    alone = replace(
        case.batch,
        positions=case.batch.positions[:2],
        slots=case.batch.slots[:2],
        query_starts=case.batch.query_starts[:3],
        context_lengths=case.batch.context_lengths[:2],
        page_table=case.batch.page_table[:2],
    )
    decodes, _ = Case(case.pool, case.qkv[:2], alone, case.spec).run(ops_of(20))
    assert torch.equal(together[:2], decodes)


def test_dynamic_rope_turns_by_each_tokens_own_length() -> None:
    case = SHAPES["prefill after a cached prefix, beside decodes"].case(torch.float32)
    spec = RopeSpec("dynamic", case.spec.rope.spec.inv_freq, factor=4.0, max_position_embeddings=64)
    case.spec = replace(case.spec, rope=Rope(spec, 4096))
    case.batch.rope_lengths = case.batch.positions + 40
    expected, expected_pool = case.reference()
    out, pool = case.run(ops_of(20))
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=0, equal_nan=True)
