"""RoPE by itself: tables, and dynamic scaling said per token. tests/cpu/test_parity_logits.py has it against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdmux_ray.model.rope import Rope, RopeSpec

pytestmark = pytest.mark.cpu

STATIC = RopeSpec(kind="default", inv_freq=(1.0, 0.1, 0.01, 0.001))
DYNAMIC = replace(STATIC, kind="dynamic", factor=2.0, max_position_embeddings=16)


def test_a_static_kind_has_tables_over_all_positions() -> None:
    rope = Rope(STATIC, context_length=50)
    assert rope.cos is not None
    assert rope.sin is not None
    assert rope.cos.shape == rope.sin.shape == (50, 4)
    cos, sin = rope.cos_sin(torch.tensor([7, 49]))
    assert torch.equal(cos, rope.cos[[7, 49]])
    torch.testing.assert_close(sin[1], torch.tensor([49.0, 4.9, 0.49, 0.049]).sin())


def test_the_attention_factor_scales_cos_and_sin() -> None:
    plain, scaled = Rope(STATIC, 8), Rope(replace(STATIC, attention_factor=1.5), 8)
    positions = torch.arange(8)
    for one, other in zip(plain.cos_sin(positions), scaled.cos_sin(positions), strict=True):
        torch.testing.assert_close(1.5 * one, other)


def test_dynamic_scaling_leaves_short_lengths_alone() -> None:
    rope, positions = Rope(DYNAMIC, 64), torch.arange(16)
    short, limit = (rope.cos_sin(positions, torch.full_like(positions, length))[0] for length in (1, 16))
    assert torch.equal(short, limit)
    torch.testing.assert_close(short, Rope(STATIC, 64).cos_sin(positions)[0])


def test_dynamic_scaling_is_a_function_of_each_tokens_own_length() -> None:
    """So neither the chunk nor the batch that a token is computed in matters."""
    rope, positions, lengths = Rope(DYNAMIC, 64), torch.tensor([3, 20, 40]), torch.tensor([10, 21, 41])
    together = rope.cos_sin(positions, lengths)[1]
    alone = torch.cat([rope.cos_sin(positions[i : i + 1], lengths[i : i + 1])[1] for i in range(3)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[2], rope.cos_sin(positions[2:], lengths[2:] + 1)[1][0])


def test_dynamic_scaling_without_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match="rope_lengths"):
        Rope(DYNAMIC, 64).cos_sin(torch.arange(4))
