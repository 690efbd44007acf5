"""The CPU kernels against the reference operations, and against themselves in another batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import LAYER, Case, Shape

from pdmux_ray.device.cpu.ops import CpuOps
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.rope import Rope, RopeSpec

pytestmark = pytest.mark.cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of values around 1: float32 by rounding of sums in another order, bfloat16 by rounding of inputs and probabilities.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-2}

SHAPES = {
    "decode": Shape(9, 3, 64, (1, 1, 1), (300, 5, 64)),
    "prefill": Shape(9, 3, 64, (200,), (200,)),
    "prefill after a cached prefix, beside decodes": Shape(9, 3, 64, (1, 70, 1, 33), (17, 150, 129, 49)),
    "one query head a kv head": Shape(4, 4, 16, (33,), (99,)),
    "many query heads a kv head": Shape(64, 1, 32, (9, 1), (80, 65)),
    "window shorter than a page": Shape(8, 1, 48, (20, 1), (70, 31), window=11),
    "window over blocks, q/k norm": Shape(8, 2, 128, (100, 5), (130, 400), window=64, qk_norm=True),
    "widest head": Shape(2, 1, 256, (9,), (80,), qk_norm=True),
    "odd head, odd page": Shape(4, 2, 80, (9, 1), (83, 22), page_size=5),
    "pages wider than a block": Shape(4, 2, 32, (90,), (200,), page_size=128),
}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def case(request: pytest.FixtureRequest, dtype: torch.dtype) -> Case:
    return request.param.case(dtype)


def test_attention_and_the_written_kv_are_those_of_the_reference(case: Case, dtype: torch.dtype) -> None:
    expected, expected_pool = case.reference()
    out, pool = case.run(CpuOps)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(pool.float(), expected_pool, atol=TOLERANCE[dtype], rtol=1e-2, equal_nan=True)


def test_a_sequence_gets_the_same_bits_alone_as_in_the_batch(case: Case) -> None:
    together, _ = case.run(CpuOps)
    starts = case.batch.query_starts.tolist()
    for sequence, (first, last) in enumerate(pairwise(starts)):
        alone, _ = case.only(sequence).run(CpuOps)
        assert torch.equal(alone, together[first:last])


def test_a_token_gets_the_same_bits_decoded_as_prefilled(case: Case) -> None:
    whole, pool = case.run(CpuOps)
    starts = case.batch.query_starts.tolist()
    case.pool = pool  # the KV of the tokens before
    for sequence, (first, last) in enumerate(pairwise(starts)):
        for query in {0, (last - first) // 2, last - first - 1}:
            decoded, _ = case.only(sequence, range(query, query + 1)).run(CpuOps)
            assert torch.equal(decoded[0], whole[first + query])


def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    threads = torch.get_num_threads()
    with_all, _ = case.run(CpuOps)
    try:
        torch.set_num_threads(1)
        with_one, _ = case.run(CpuOps)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(with_one, with_all)


def test_a_step_changes_its_own_slots_of_its_layer_only(case: Case) -> None:
    _, pool = case.run(CpuOps)
    changed = (pool.view(torch.uint8) != case.pool.view(torch.uint8)).any(-1).any(3)  # [layers, 2, pages, slots]
    expected = torch.zeros_like(changed).flatten(2)
    expected[LAYER, :, case.batch.slots] = True
    assert torch.equal(changed.flatten(2), expected)


def test_dynamic_rope_turns_by_each_tokens_own_length() -> None:
    case = SHAPES["prefill after a cached prefix, beside decodes"].case(torch.float32)
    spec = RopeSpec("dynamic", case.spec.rope.spec.inv_freq, factor=4.0, max_position_embeddings=64)
    case.spec = replace(case.spec, rope=Rope(spec, 4096))
    case.batch.rope_lengths = case.batch.positions + 40
    expected, expected_pool = case.reference()
    out, pool = case.run(CpuOps)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[torch.float32], rtol=0)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("width", [16, 56, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norm_and_activation_are_those_of_the_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    pool = torch.zeros(1, 2, 1, 1, 16, 16, dtype=dtype)
    fast, plain = CpuOps(pool), ReferenceOps(pool.float())
    x, weight, gate_up = (torch.randn(shape).to(dtype) for shape in ((rows, width), (width,), (rows, 2 * width)))
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 90.0, -90.0])
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    expected = plain.rms_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(fast.rms_norm(x, weight, 1e-5).float(), expected, atol=tolerance, rtol=tolerance)
    expected = plain.silu_mul(gate_up.float())
    torch.testing.assert_close(fast.silu_mul(gate_up).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 576)])
def test_a_row_of_a_linear_does_not_depend_on_the_other_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    ops = CpuOps(torch.zeros(1, 2, 1, 1, 16, 16, dtype=dtype))
    packed = ops.pack_linear((torch.randn(outputs, inputs) * 0.05).to(dtype), torch.randn(outputs).to(dtype))
    x, residual = torch.randn(300, inputs).to(dtype), torch.randn(300, outputs).to(dtype)
    plain, added = ops.linear(x, packed), ops.linear(x, packed, residual)
    for rows in (1, 2, 3, 4, 7, 8, 16, 31, 64, 100):
        assert torch.equal(ops.linear(x[:rows], packed), plain[:rows])
        assert torch.equal(ops.linear(x[:rows], packed, residual[:rows]), added[:rows])


def test_a_thread_takes_wide_heads_after_many_narrow_ones(dtype: torch.dtype) -> None:
    for shape in (Shape(512, 1, 16, (1,), (70,)), Shape(2, 1, 128, (9,), (80,))):
        case = shape.case(dtype)
        torch.testing.assert_close(case.run(CpuOps)[0].float(), case.reference()[0], atol=TOLERANCE[dtype], rtol=0)
