"""Whole decoders over CudaOps, and what a step may not do: allocate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Shape
from paged_forward import load_paged, run_sequences
from test_rowwise_kernels import noise
from tiny_models import VOCAB, save_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.errors import IntegrityError
from pdmux_ray.model.decoder import Decoder
from pdmux_ray.model.ops import AttentionBatch
from pdmux_ray.model.reference_ops import ReferenceOps

pytestmark = pytest.mark.cpu

SMS = 6
MODELS = ["llama, mlp bias", "qwen3, tied, attention bias", "mistral, sliding window"]


def on_a_lane(dtype: torch.dtype, tokens: int = 64) -> Callable[[Tensor], CudaOps]:
    return lambda pool: CudaOps(pool, Scratch("cpu", dtype, tokens), SMS)


def sequences() -> list[list[int]]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=rng).tolist() for length in (11, 6)]


@pytest.mark.parametrize("model", MODELS)
def test_a_decoder_gives_the_logits_of_the_reference(model: str, tmp_path: Path) -> None:
    """Two prompts in chunks of four tokens, then a token at a time, by layer blocks: batches, prefixes and decodes."""
    save_tiny(model, tmp_path)
    expected = run_sequences(load_paged(tmp_path), sequences(), prompt_tokens=6, chunk=4)
    decoder = load_paged(tmp_path, make_ops=on_a_lane(torch.float32))
    found = run_sequences(decoder, sequences(), prompt_tokens=6, chunk=4, layer_block=2)
    for logits, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_decoder_in_half_precision_is_as_near_as_its_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    expected = run_sequences(load_paged(tmp_path), sequences()[:1], prompt_tokens=9)
    rounded = run_sequences(load_paged(tmp_path, dtype), sequences()[:1], prompt_tokens=9)
    found = run_sequences(load_paged(tmp_path, dtype, make_ops=on_a_lane(dtype)), sequences()[:1], prompt_tokens=9)
    for logits, other, wanted in zip(found, rounded, expected, strict=True):
        assert (logits - wanted).norm() <= 1.5 * (other - wanted).norm()


class NothingNew(TorchDispatchMode):
    """Raises when an operation returns a tensor with memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known]
        assert not [t for t in new if t.untyped_storage().nbytes()], f"{func} allocates"
        return out


def one_token_each(contexts: list[int]) -> AttentionBatch:
    """Sequence b has page b * 4 and the three after it, of 4 tokens each."""
    last = torch.tensor(contexts) - 1
    table = torch.arange(4 * len(contexts), dtype=torch.int32).view(-1, 4)
    return AttentionBatch(
        positions=last,
        slots=(table[torch.arange(len(contexts)), last // 4] * 4 + last % 4).long(),
        query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        page_table=table,
    )


def slice_of(tokens: int) -> AttentionBatch:
    place = torch.arange(tokens)
    return AttentionBatch(
        positions=place,
        slots=place,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lengths=torch.tensor([tokens], dtype=torch.int32),
        page_table=torch.arange(4, dtype=torch.int32)[None],
    )


def forward(decoder: Decoder, tokens: int, batch: AttentionBatch, out: Tensor) -> None:
    """One layer: the others do the same."""
    hidden = decoder.run_layers(0, 1, decoder.embed(TOKENS[:tokens]), batch)
    decoder.logits(hidden[: len(out)], out=out)


TOKENS = torch.arange(16)


def test_a_step_allocates_nothing_once_the_lane_is_warm(tmp_path: Path) -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=16, max_sequences=3)
    decoder = load_paged(save_tiny("qwen3", tmp_path), torch.float16, make_ops=lambda pool: CudaOps(pool.zero_(), scratch, SMS))
    out = torch.empty(3, VOCAB)
    with torch.inference_mode():
        for tokens, batch in ((16, slice_of(16)), (3, one_token_each([1, 1, 1])), (2, slice_of(2))):
            forward(decoder, tokens, batch, out[: len(batch.context_lengths)])
        scratch.freeze()
        steps = [(3, one_token_each([16, 2, 9])), (2, one_token_each([4, 7])), (11, slice_of(11)), (2, slice_of(2))]
        with NothingNew():
            for tokens, batch in steps:
                forward(decoder, tokens, batch, out[: len(batch.context_lengths)])
    assert out.isfinite().all()


def test_an_allocation_would_be_seen() -> None:
    with NothingNew(), pytest.raises(AssertionError, match=r"add\.Tensor allocates"):
        TOKENS.add(1)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_that_of_the_reference_and_adds_into_its_residual(bias: bool) -> None:
    ops = CudaOps(torch.zeros(1, 2, 1, 1, 16, 16), Scratch("cpu", torch.float32, 8, max_sequences=2), SMS)
    weight, offset = noise(7, 5, dtype=torch.float32), noise(7, dtype=torch.float32) if bias else None
    packed = ops.pack_linear(weight, offset)
    for rows in (1, 8):
        x, residual = noise(rows, 5, dtype=torch.float32, seed=rows), noise(rows, 7, dtype=torch.float32)
        expected = ReferenceOps(torch.zeros(1, 2, 1, 1, 16, 16)).linear(x, (weight, offset), residual)
        torch.testing.assert_close(ops.linear(x, packed), expected - residual)
        added = ops.linear(x, packed, residual)
        assert added.data_ptr() == residual.data_ptr()
        torch.testing.assert_close(residual, expected)


def test_logits_have_room_for_the_sequences_of_a_step_and_not_for_its_tokens() -> None:
    scratch = Scratch("cpu", torch.float16, max_tokens=1000, max_sequences=2)
    ops = CudaOps(torch.zeros(1, 2, 1, 1, 16, 16), scratch, SMS)
    ops.linear(noise(2, 8, dtype=torch.float16), ops.pack_linear(noise(500, 8, dtype=torch.float16), None))
    assert scratch.allocated_bytes == 2 * 500 * 2


def test_a_step_of_more_sequences_than_the_lane_was_made_for_is_an_error() -> None:
    case = Shape(4, 2, 16, (2, 3), (20, 9)).case(torch.float32)
    ops = CudaOps(case.pool, Scratch("cpu", torch.float32, 16, max_sequences=1), SMS)
    with pytest.raises(IntegrityError, match="2 sequences on a lane made for 1"):
        ops.qkv_to_attention(0, case.qkv, case.batch, case.spec)


def test_two_lanes_of_one_pool_do_not_share_results() -> None:
    case = Shape(4, 2, 16, (1, 1), (20, 9)).case(torch.float32)
    lanes = [on_a_lane(torch.float32)(case.pool) for _ in range(2)]
    first = lanes[0].qkv_to_attention(0, case.qkv.clone(), case.batch, case.spec)
    kept = first.clone()
    lanes[1].qkv_to_attention(1, case.qkv * 2, case.batch, case.spec)
    assert torch.equal(first, kept)
