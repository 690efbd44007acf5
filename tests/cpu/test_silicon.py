"""Step times from the database of aiconfigurator. Needs it installed, and a second to read it."""

from __future__ import annotations

import pytest

from pdmux_ray.costs.catalog import device_of
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.silicon import compiled
from pdmux_ray.costs.sm_share import Assumptions
from pdmux_ray.latency.profile import rising
from pdmux_ray.policy.views import Piece

pytestmark = pytest.mark.cpu
HUB = {"llama-8b": "meta-llama/Meta-Llama-3.1-8B", "llama-70b": "meta-llama/Meta-Llama-3.1-70B"}


def device(shape: str, tp: int, gpu: str = "H200") -> DeviceModel:
    """Without the host, which the database does not know."""
    return device_of(gpu, shape, tp=tp, costs="silicon", page_size=16, assume=Assumptions(host_s=0.0))


@pytest.mark.parametrize(("shape", "tp"), [("llama-8b", 1), ("llama-70b", 4), ("llama-70b", 8)])
def test_steps_take_what_the_sums_of_measured_operations_say(shape: str, tp: int) -> None:
    found, engine = device(shape, tp), compiled(HUB[shape], "h200_sxm", "vllm", tp_size=tp)
    for batch in (1, 8, 32, 128, 256):
        for context in (512, 1024, 8192):
            predicted_s = found.costs.decode(batch, batch * context, found.units, 0).predicted_s
            assert predicted_s == pytest.approx(engine.decode_step_latency(batch, context, 2) / 1e3, rel=0.06)
    for new in (128, 512, 1024, 4096, 16_384):
        for prior in (0, 2048, 16_384):
            predicted_s = found.costs.prefill((Piece(new, prior),), found.layout.layers, found.units, 0, last=True).predicted_s
            assert predicted_s == pytest.approx(engine.predict_prefill_latency(1, new + prior, prior) / 1e3, rel=0.1)


def test_a_model_that_the_database_does_not_know_is_one_of_as_many_weights() -> None:
    """OPT-13B's 25.7 GB at 0.8 of 2.04 TB/s are 15.7 ms."""
    found = device("opt-13b", 1, "A100")
    assert 0.0157 < found.costs.decode(1, 16, 108, 0).predicted_s < 1.5 * 0.0157
    assert found.layout.layers == 40


def test_an_a800_is_an_a100_whose_all_reduces_take_half_as_much_longer_for_their_bytes() -> None:
    """Its NVLink carries 400 GB/s of 600. One GPU alone sends nothing."""

    def times(gpu: str, tp: int) -> list[float]:
        costs, prompts = device("llama-70b", tp, gpu).costs, ((Piece(1, 0),), (Piece(8192, 0),))
        return [costs.prefill(prompt, 80, 108, 0, last=True).predicted_s for prompt in prompts]

    assert times("A800", 1) == times("A100", 1)
    (least_s, many_s), (slower_least_s, slower_many_s) = times("A100", 8), times("A800", 8)
    assert slower_least_s == pytest.approx(least_s, rel=0.01)
    sent_s = 160 * 2 * 7 / 8 * 8192 * 8192 * 2 / 300e9  # a ring's bytes, at the whole rate of an A100's link
    assert 0.5 * sent_s < slower_many_s - many_s < sent_s


@pytest.mark.parametrize("gpu", ["H200", "H100", "B200", "A100", "A800"])
def test_parameters_are_sound_as_those_of_a_profile_must_be(gpu: str) -> None:
    assert rising(device("llama-70b", 4, gpu).costs.parameters) is None  # type: ignore[attr-defined]
