"""Whatever shares the device with a request, and however its units are split, it gets the tokens of prefill_first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny

from pdmux_ray.bench.correctness import CONTEXT, KINDS, PAGE, ROOMY, ScheduleBench
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import limit_spinning
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.types import ModelFacts

limit_spinning()
from pdmux_ray.device.cpu.runner import CpuRunner  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(usable_cores() < 2, reason="two lanes need two cores"),
]

SCHEDULES = 500  # of each kind
FACTS = ModelFacts(CONTEXT, VOCAB, frozenset({2}))
CONFIG = {"device": "cpu", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.001, "threads": 2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def device(model_dir: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner(model_dir, EngineConfig.model_validate(CONFIG))
    assert runner.pages >= ROOMY
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def bench(device: CpuRunner) -> ScheduleBench:
    return ScheduleBench(device, FACTS)


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_give_the_tokens_of_prefill_first(device: CpuRunner, bench: ScheduleBench, kind: str) -> None:
    found = bench.run(kind, range(SCHEDULES))
    assert found.wrong == []
    assert (found.schedules, device._jobs) == (SCHEDULES, {})
    assert found.preemptions > 0
    assert not KINDS[kind].drawn or set(KINDS[kind].drawn) == {mode for mode in KINDS[kind].drawn if found.modes[mode.value]}
