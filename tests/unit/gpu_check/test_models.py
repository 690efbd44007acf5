"""What a step must read and compute, by hand."""

from __future__ import annotations

import pytest

from pdmux_ray.gpu_check.models import CODELLAMA_34B, LLAMA_8B, ModelShape

ONE = ModelShape("one", layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=3, vocab_size=5, context_length=8)


def test_the_shapes_have_the_parameters_of_the_models() -> None:
    assert LLAMA_8B.linear_parameters + 2 * 128_256 * 4096 == pytest.approx(8.03e9, rel=0.001)
    assert CODELLAMA_34B.linear_parameters + 2 * 32_000 * 8192 == pytest.approx(33.74e9, rel=0.001)


def test_a_token_of_llama_has_128_kib_of_kv() -> None:
    assert LLAMA_8B.kv_bytes == 2**17


def test_a_decode_step_reads_matrices_and_head_once_and_every_context() -> None:
    matrices = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 3  # q; k and v; o; gate, up and down
    assert ONE.linear_parameters == matrices
    assert ONE.decode_bytes(batch=2, context=10) == 2 * (matrices + 5 * 4) + 2 * 10 * 1 * 2 * 1 * 2 * 2


def test_a_prefill_computes_each_weight_for_each_token_and_each_visible_pair() -> None:
    assert ONE.prefill_flop(3) == 2 * ONE.linear_parameters * 3 + 6 * 2 * (2 + 2) * 2  # 6 pairs, 2 heads, q·k and p·v of 2 each
