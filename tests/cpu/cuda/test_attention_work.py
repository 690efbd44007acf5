"""How attention's work is cut: by shapes and by the lane's SMs, never by what the tensors hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Shape
from hypothesis import given
from hypothesis import strategies as st
from test_attention_kernels import ops_of
from triton.runtime import interpreter

from pdmux_ray.device.cuda.kernels.decode_attention import pieces_for, shares_for
from pdmux_ray.device.cuda.kernels.prefill_attention import rows_a_block

pytestmark = pytest.mark.cpu


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 512), st.integers(1, 131072))
def test_a_decode_step_has_up_to_two_ctas_an_sm_of_the_lane_and_128_tokens_a_share(
    sms: int, kv_heads: int, batch: int, longest: int
) -> None:
    shares = shares_for(sms, kv_heads, batch, longest)
    if shares > 1:
        assert shares * kv_heads <= 2 * sms
        assert shares * 128 <= batch * longest
    if batch * longest >= 128 * (2 * sms // kv_heads):
        assert shares * kv_heads > 2 * sms - kv_heads or shares == 1
    assert shares + batch <= pieces_for(sms, kv_heads, batch)


def test_a_smaller_lane_gets_fewer_ctas() -> None:
    shares = [shares_for(sms, 8, 32, 8192) for sms in (16, 48, 132)]
    assert shares == [4, 12, 33]
    assert [rows_a_block(1024, 32, 128, sms) for sms in (132, 264)] == [128, 64]


def test_a_prefill_block_holds_what_its_warps_can_accumulate() -> None:
    assert rows_a_block(8192, 32, 128, 132) == 128
    assert rows_a_block(8192, 32, 256, 132) == 64


def test_a_decode_step_is_cut_into_its_shares_whatever_its_contexts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    set_grid_dim = interpreter.InterpreterBuilder.set_grid_dim

    def noted(self: Any, *grid: int) -> None:
        grids.append(grid)
        set_grid_dim(self, *grid)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_dim", noted)
    seen = []
    for contexts in ((300, 300), (300, 3), (1, 290)):
        Shape(4, 2, 16, (1, 1), contexts).case(torch.float32).run(ops_of(20))
        seen.append(tuple(grids))
        grids.clear()
    assert len(set(seen)) == 1
    assert (shares_for(20, kv_heads=2, batch=2, longest=304), 2, 1) in seen[0]
