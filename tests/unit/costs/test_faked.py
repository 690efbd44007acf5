from __future__ import annotations

from typing import get_args

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.config import FakeConfig
from pdmux_ray.costs.faked import faked
from pdmux_ray.costs.gpu import A100, CODE_LLAMA_34B, GPUS, SHAPES, device_model
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import NewRequest, SamplingParams, Split

PROMPT, PAGE = 64, 16


def test_the_configuration_names_every_gpu_and_shape() -> None:
    fields = FakeConfig.model_fields
    gpus = [name for kind in get_args(fields["gpu"].annotation) for name in get_args(kind)]
    assert (gpus, list(get_args(fields["shape"].annotation))) == (list(GPUS), list(SHAPES))


def test_with_a_gpu_it_is_that_one() -> None:
    found, device = faked(FakeConfig(gpu="A100", shape="codellama-34b")), device_model(A100, CODE_LLAMA_34B)
    assert (found.layers, found.units, found.splits) == (device.layout.layers, device.units, device.splits)
    assert found.costs.decode(8, 800, 108, 0) == device.costs.decode(8, 800, 108, 0)


def test_without_one_it_is_what_the_keys_say() -> None:
    found = faked(FakeConfig(step_s=0.5, units=4, layers=3))
    assert (found.layers, found.units, found.splits) == (3, 4, None)
    assert found.costs.decode(1, 1, 4, 0).predicted_s == pytest.approx(0.5)


@pytest.fixture
def runner() -> FakeRunner:
    device = faked(FakeConfig(gpu="A100", shape="codellama-34b"))
    return FakeRunner(
        *(PROMPT // PAGE + 1, PAGE, 0.0, 0.0, VirtualClock()),
        layers=device.layers,
        units=device.units,
        costs=device.costs,
        splits=device.splits,
    )


def prompt() -> PrefillSlice:
    new = NewRequest("a", tuple(range(PROMPT)), SamplingParams())
    request = Request(new, context_length=128, eos_token_ids=frozenset(), page_size=PAGE, prefix_cache=False, now=0.0)
    request.pages = list(range(PROMPT // PAGE + 1))
    return PrefillSlice(request, 0, PROMPT, sample=True)


def test_a_step_in_one_pass_takes_the_gpu_s_time(runner: FakeRunner) -> None:
    costs, clock = runner.costs, runner._clock
    runner.launch(StepBatch([], [prompt()]))
    runner.collect()
    assert clock.now() == pytest.approx(costs.mixed(0, 0, [Piece(PROMPT, 0)], runner.units).predicted_s)
    before_s = clock.now()
    runner.launch(StepBatch([prompt().sequence], []))
    runner.collect()
    assert clock.now() - before_s == pytest.approx(costs.decode(1, PROMPT, runner.units, 0).predicted_s)


def test_so_does_a_block_beside_decodes(runner: FakeRunner) -> None:
    split = Split(60, 48)
    runner.open_job(1, [prompt()])
    runner.launch_block(1, runner.layers, split)
    assert runner.collect_block() is not None
    assert runner.block_s == runner.costs.prefill([Piece(PROMPT, 0)], runner.layers, 60, 48, True).predicted_s
