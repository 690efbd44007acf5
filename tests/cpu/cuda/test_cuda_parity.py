"""The CUDA runner as a GPU would run it, kernels and all, in Triton's interpreter: the tokens of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreter import patch_once_a_launch
from recorded import PAGE, recorded_runner
from test_runner import DRAWN, GREEDY, Sequence, alone, prompt, run, whole
from tiny_models import VOCAB, save_tiny

from pdmux_ray.bench.correctness import CONTEXT, ScheduleBench
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.startup import triton_kernels
from pdmux_ray.engine.runner import StepBatch
from pdmux_ray.types import ModelFacts, Split
from tests.examples import tried

pytestmark = pytest.mark.cpu

MODELS = ("llama", "qwen3, tied, attention bias", "mistral, sliding window", "llama, dynamic rope")
SPLITS = (Split(6, 2), Split(2, 6))  # few: each level has graphs of its own, which take their time here
SMALL = {"max_batch": 3, "max_prefill_tokens": 8, "chunk_tokens": 8, "context_length": 48}


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    with patch_once_a_launch():
        yield


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Iterator[CpuRunner]:
    config = {"device": "cpu", "dtype": "float32", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.002}
    runner = CpuRunner(model_dir, EngineConfig.model_validate(config))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Iterator[CudaRunner]:
    cuda = {"look_ahead": 3, "decode_buckets": [1, 3]}
    runner, _ = recorded_runner(model_dir, kernels=triton_kernels(), splits=SPLITS, **SMALL, cuda=cuda)
    yield runner
    runner.close()


def test_greedy_and_drawn_tokens_in_every_way_to_compute_them(runner: CudaRunner, cpu: CpuRunner) -> None:
    """A prefill in one pass, in passes and by blocks, on cached pages; decodes alone and together, single and in bursts, at
    splits that change."""
    first = Sequence(prompt(1, 19), list(range(7)), GREEDY, request_id="a")
    second = Sequence(prompt(2, 6), list(range(10, 15)), DRAWN, request_id="b")
    expected = {s.request_id: alone(cpu, s, 9) for s in (first, second)}
    run(runner, [], whole(second))
    runner.open_job(0, [whole(first)])
    for end, split in enumerate((Split(6, 2), Split(2, 6), Split(8, 8)), 1):
        runner.launch_block(0, end, split)
        if end < 3:
            decode(runner, [second], 1, Split(6, 2))
        output = runner.collect_block()
    assert output is not None
    first.tokens.extend(output.tokens)
    decode(runner, [first, second], 3, Split(6, 2))
    decode(runner, [second, first], 2, None)
    run(runner, [second], whole(again := Sequence(list(first.tokens), list(range(20, 27)), GREEDY, 19, "c")))
    decode(runner, [again], 2, Split(2, 6))
    assert again.tokens[19:] == expected["a"][: len(again.tokens) - 19]
    for sequence in (first, second):
        made = sequence.tokens[sequence.prompt_tokens :]
        assert made == expected[sequence.request_id][: len(made)]
        assert len(made) >= 6


def decode(runner: CudaRunner, sequences: list[Sequence], steps: int, split: Split | None) -> None:
    runner.launch(StepBatch(sequences, [], steps), split=split)
    for _ in range(steps):
        output = runner.collect()
        assert output is not None
        for sequence, token in zip(sequences, output.tokens, strict=True):
            sequence.tokens.append(token)


def test_a_random_schedule_gives_the_tokens_of_the_cpu(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mode, drawn anew for each step."""
    model_dir = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    monkeypatch.setattr("pdmux_ray.bench.correctness.REQUESTS", 6)
    facts = ModelFacts(CONTEXT, VOCAB, frozenset({2}))
    config = {"device": "cpu", "dtype": "float32", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.002}
    reference = CpuRunner(model_dir, EngineConfig.model_validate(config))
    expected = ScheduleBench(reference, facts).expected
    reference.close()
    runner, _ = recorded_runner(model_dir, kernels=triton_kernels(), splits=SPLITS)
    bench = ScheduleBench(runner, facts)
    assert bench.expected.tokens == expected.tokens
    assert bench.run("random modes", range(tried(3))).wrong == []
    runner.close()
