from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import (
    A100,
    CODE_LLAMA_34B,
    GPUS,
    H200,
    LLAMA_8B,
    LLAMA_70B,
    SHAPES,
    Gpu,
    GpuModel,
    device_model,
    parameters,
)
from pdmux_ray.costs.sm_share import Assumptions, assumptions, scaled
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.profile import rising
from pdmux_ray.policy.views import CostModel, Piece

MODEL = device_model(H200, LLAMA_8B)
COSTS, UNITS, LAYERS = MODEL.costs, MODEL.units, MODEL.layout.layers
NO_HOST = Assumptions(host_s=0.0)
KERNELS = device_model(H200, LLAMA_8B, assume=NO_HOST).costs  # what was published is of kernels


@pytest.mark.parametrize(
    ("piece", "published_s"), [(Piece(1024, 0), 0.0212), (Piece(4096, 0), 0.0928), (Piece(4096, 4096), 0.1068)]
)
def test_a_prefill_takes_what_was_published_of_the_gpu_that_its_rates_are_from(piece: Piece, published_s: float) -> None:
    assert KERNELS.prefill((piece,), LAYERS, UNITS, 0, last=True).predicted_s == pytest.approx(published_s, rel=0.02)


@pytest.mark.parametrize(
    ("batch", "context", "published_s"), [(1, 1024, 0.00486), (32, 1024, 0.00632), (128, 1024, 0.00994), (32, 8192, 0.0134)]
)
def test_a_decode_takes_what_was_published_of_the_gpu_that_its_rates_are_from(
    batch: int, context: int, published_s: float
) -> None:
    assert KERNELS.decode(batch, batch * context, UNITS, 0).predicted_s == pytest.approx(published_s, rel=0.04)


def test_what_nothing_was_taken_from_is_predicted_too() -> None:
    mixed_s = KERNELS.mixed(32, 32 * 4224, (Piece(2048, 0),), UNITS).predicted_s
    assert mixed_s == pytest.approx(0.0487, rel=0.05)
    other = device_model(A100, LLAMA_8B, assume=NO_HOST)
    assert other.costs.prefill((Piece(1024, 0),), LAYERS, 108, 0, last=True).predicted_s == pytest.approx(0.0647, rel=0.02)
    assert other.costs.decode(32, 32 * 1024, 108, 0).predicted_s == pytest.approx(0.0156, rel=0.2)


def test_few_multiprocessors_decode_as_slowly_as_published() -> None:
    def decode_s(units: int) -> float:
        return COSTS.decode(32, 65_536, units, 0).predicted_s - COSTS.decode(1, 0, UNITS, 0).predicted_s

    whole_s = COSTS.decode(32, 65_536, UNITS, 0).predicted_s
    assert COSTS.decode(32, 65_536, 16, 0).predicted_s / whole_s == pytest.approx(36 / 16.9, rel=0.15)
    assert COSTS.decode(32, 65_536, 64, 0).predicted_s / whole_s == pytest.approx(18.6 / 16.9, rel=0.05)
    assert decode_s(16) > decode_s(64) > decode_s(UNITS)


@pytest.mark.parametrize("split", MODEL.splits)
def test_a_prefill_beside_them_slows_decodes_by_no_more_than_was_published(split) -> None:  # type: ignore[no-untyped-def]
    alone_s = COSTS.decode(32, 65_536, split.decode_units, 0).predicted_s
    assert alone_s <= COSTS.decode(32, 65_536, split.decode_units, split.prefill_units).predicted_s <= 1.3 * alone_s


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_its_parameters_are_sound_as_those_of_a_profile_must_be(gpu: Gpu, shape: GpuModel) -> None:
    assert rising(parameters(gpu, shape)) is None
    assert rising(parameters(gpu, shape, tp=8)) is None
    assert device_model(gpu, shape, tp=8).layout.pages > 0


@pytest.mark.parametrize("field", [field.name for field in fields(Assumptions)])
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_conclusion_can_be_tried_with_every_assumption_halved_and_doubled(field: str, times: float) -> None:
    assume = replace(Assumptions(), **{field: scaled(field, getattr(Assumptions(), field), times)})
    device = device_model(H200, LLAMA_70B, tp=4, assume=assume)
    assert rising(parameters(H200, LLAMA_70B, tp=4, assume=assume)) is None
    assert changed(device) != changed(device_model(H200, LLAMA_70B, tp=4))


def test_the_gpu_waits_for_the_host_in_every_step_and_every_block_of_layers() -> None:
    slow = device_model(H200, LLAMA_8B, assume=Assumptions(host_s=0.002)).costs
    for units in (16, 64, UNITS):
        for batch in (1, 256):
            step = (batch, 1000 * batch, units, 0)
            assert slow.decode(*step).predicted_s - KERNELS.decode(*step).predicted_s == pytest.approx(0.002)
        for layers, new in ((1, 64), (LAYERS, 8192)):
            block = ((Piece(new, 0),), layers, units, 0, layers == LAYERS)
            assert slow.prefill(*block).predicted_s - KERNELS.prefill(*block).predicted_s == pytest.approx(0.002)
    both = (8, 8000, (Piece(2048, 0),), UNITS)
    assert slow.mixed(*both).predicted_s - KERNELS.mixed(*both).predicted_s == pytest.approx(0.002)


def changed(device: DeviceModel) -> tuple[object, ...]:
    """What an assumption may change."""
    costs, piece = device.costs, (Piece(2048, 0),)
    return (
        *(costs.decode(32, 65_536, 64, 68), costs.prefill(piece, 80, 68, 64, last=True), costs.mixed(32, 65_536, piece, 132)),
        *(costs.decode(32, 65_536, 132, 64), costs.switch_s, device.link_bytes_per_s),
    )


def test_a_group_of_four_has_four_times_the_rates_and_tells_itself_what_it_computed() -> None:
    """70.55e9 parameters of 2 bytes at 0.8 of 4 x 4.8 TB/s are 9.1 ms; 160 sums of 6 us, and those of the rows, 1 ms."""
    one, four = device_model(H200, LLAMA_70B), device_model(H200, LLAMA_70B, tp=4)
    assert four.costs.decode(1, 100, 132, 0).predicted_s == pytest.approx(0.00905 + 0.00095 + 160 * 6e-6, rel=0.02)
    assert four.link_bytes_per_s == 4 * one.link_bytes_per_s
    assert four.layout.total_bytes == pytest.approx(4 * 0.9 * 141e9 - 141.1e9, rel=0.002)
    assert "4 x H200" in four.name
    many = (Piece(16_384, 0),)
    computed_s = one.costs.prefill(many, 80, 132, 0, last=True).predicted_s / 4
    sent_s = 160 * 16_384 * 8192 * 2 * 1.5 / (0.65 * 450e9)
    assert four.costs.prefill(many, 80, 132, 0, last=True).predicted_s == pytest.approx(computed_s + sent_s, rel=0.01)


def test_a_group_larger_than_its_kv_heads_reads_no_kv_sooner_as_several_hold_the_same() -> None:
    eight, sixteen = (device_model(H200, LLAMA_8B, tp=tp).costs for tp in (8, 16))

    def context_s(costs: CostModel) -> float:
        return costs.decode(64, 64 * 8192, UNITS, 0).predicted_s - costs.decode(64, 64, UNITS, 0).predicted_s

    assert context_s(sixteen) == pytest.approx(context_s(eight))


def test_heads_that_a_group_cannot_share_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="OPT-66B has 72 heads, 72 of KV: 16 GPUs cannot share them out"):
        device_model(A100, SHAPES["opt-66b"], tp=16)
    assert device_model(H200, LLAMA_70B, tp=16).layout.pages < 2 * device_model(H200, LLAMA_70B, tp=8).layout.pages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decode_besides=1", "there is no such assumption. Give one of compute_exponent, read_loss, decode_beside"),
        ("link", "is not understood: give KEY=NUMBER"),
        ("link=0", "link=0: give more than 0"),
        ("switch_s=-1", "a number from 0 to 100"),
        ("allreduce_efficiency=1.1", "is a share; give at most 1"),
        ("decode_beside=5", "is a share; give at most 1"),
        ("guard=0.9", "no less than its prediction"),
        ("guard=nan", "a number from 0 to 100"),
    ],
)
def test_what_cannot_be_assumed_is_told(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        assumptions([change])
    assert assumptions(["link=0.5", "guard = 1.2"]) == Assumptions(link=0.5, guard=1.2)


def test_a_34b_model_has_the_published_size_and_reads_its_weights_in_that_time() -> None:
    """33.74e9 parameters of 2 bytes at 0.8 of 4.8 TB/s are 17.6 ms, less the input embeddings, which are not read."""
    device = device_model(H200, CODE_LLAMA_34B)
    assert device.costs.decode(1, 100, H200.units, 0).predicted_s == pytest.approx(0.0176 + 0.00095, rel=0.03)
    assert device.kv_bytes_per_token == 196_608


@given(st.integers(1, 30_000), st.integers(0, 30_000), st.sampled_from(MODEL.splits), st.sampled_from(MODEL.splits))
def test_more_multiprocessors_are_never_slower(new: int, prior: int, one, other) -> None:  # type: ignore[no-untyped-def]
    fewer, more = sorted((one, other), key=lambda split: split.prefill_units)
    piece = (Piece(new, prior),)
    slow_s, fast_s = (
        COSTS.prefill(piece, 8, split.prefill_units, split.decode_units, last=False).predicted_s for split in (fewer, more)
    )
    assert fast_s <= slow_s


def test_the_pool_is_what_the_weights_leave() -> None:
    assert MODEL.kv_bytes_per_token == 131_072
    assert MODEL.layout.total_bytes == pytest.approx(0.9 * 141e9 - 16.06e9, rel=0.001)
