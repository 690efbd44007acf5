"""Random schedules on the CUDA runner: in every mode, at every split, in bursts and alone, the tokens are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import PAGE, recorded_runner
from tiny_models import VOCAB, save_tiny

from pdmux_ray.bench.correctness import CONTEXT, KINDS, ROOMY, Answers, ScheduleBench
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.types import ModelFacts
from tests.examples import tried

pytestmark = pytest.mark.cpu

SCHEDULES = tried(24)  # of each kind
MODELS = {"llama": True, "qwen3, windows, dynamic rope": False}  # -> whether prefixes are shareable


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_dir(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def facts(model: str) -> ModelFacts:
    return ModelFacts(CONTEXT, VOCAB, frozenset({2}), prefixes_are_shareable=MODELS[model])


@pytest.fixture(scope="module")
def expected(model_dir: Path, facts: ModelFacts) -> Iterator[Answers]:
    """What each request of the schedules gets on the CPU, alone in float32."""
    config = {"device": "cpu", "dtype": "float32", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.002}
    runner = CpuRunner(model_dir, EngineConfig.model_validate(config))
    yield ScheduleBench(runner, facts).expected
    runner.close()


@pytest.fixture(scope="module", params=[1, 3], ids=["single steps", "bursts"])
def bench(request: pytest.FixtureRequest, model_dir: Path, facts: ModelFacts, expected: Answers) -> Iterator[ScheduleBench]:
    runner, _ = recorded_runner(model_dir, 7, cuda={"look_ahead": request.param, "decode_buckets": [1, 3, 6]})
    assert runner.pages >= ROOMY
    played = ScheduleBench(runner, facts)
    assert played.expected.tokens == expected.tokens
    yield played
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_give_the_tokens_of_the_cpu(bench: ScheduleBench, kind: str) -> None:
    found = bench.run(kind, range(SCHEDULES))
    assert found.wrong == []
    assert found.schedules == SCHEDULES
