"""The CPU runner: steps of many kinds give the tokens that one request alone gets."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, load_reference, reference_logits, save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.device.cpu.runner import CpuRunner, resolve_dtype
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.types import SamplingParams

pytestmark = pytest.mark.cpu

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
DRAWN = SamplingParams(max_tokens=100, temperature=1.3, top_p=0.95, seed=5)
PAGE = 4


@dataclass
class Sequence:
    tokens: list[int]
    pages: list[int]
    params: SamplingParams = DRAWN
    prompt_tokens: int = 0
    request_id: str = "r"
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, model_dir: Path) -> CpuRunner:
    return make_runner(model_dir, request.param)


def make_runner(model_dir: Path, dtype: str) -> CpuRunner:
    settings = {"device": "cpu", "dtype": dtype, "page_size": PAGE, "kv_cache_gib": 0.001}
    runner = build_runner(model_dir, EngineConfig.model_validate(settings))
    assert isinstance(runner, CpuRunner)
    return runner


def run(runner: CpuRunner, decodes: list[Sequence], *prefills: PrefillSlice) -> list[int]:
    """One step; sampled tokens are appended to their requests."""
    runner.launch(StepBatch(decodes, prefills))
    output = runner.collect()
    assert output is not None
    for sequence, token in zip([*decodes, *(p.sequence for p in prefills if p.sample)], output.tokens, strict=True):
        assert isinstance(sequence, Sequence)
        sequence.tokens.append(token)
    return output.tokens


def whole(sequence: Sequence) -> PrefillSlice:
    return PrefillSlice(sequence, 0, len(sequence.tokens), sample=True)


def prompt(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(runner: CpuRunner, sequence: Sequence, tokens: int) -> list[int]:
    """What the request gets by itself."""
    single = replace(sequence, tokens=list(sequence.tokens))
    run(runner, [], whole(single))
    for _ in range(tokens - 1):
        run(runner, [single])
    return single.tokens[single.prompt_tokens :]


def test_greedy_tokens_are_those_of_transformers(model_dir: Path) -> None:
    sequence = Sequence(prompt(0, 13), list(range(10)), GREEDY)
    runner = make_runner(model_dir, "float32")
    run(runner, [], whole(sequence))
    for _ in range(20):
        run(runner, [sequence])
    best = reference_logits(load_reference(model_dir), sequence.tokens[:-1]).argmax(-1).tolist()
    assert sequence.tokens[13:] == best[12:]


def test_a_request_gets_the_same_tokens_chunked_and_beside_others(runner: CpuRunner) -> None:
    first, second = Sequence(prompt(1, 11), [9, 2, 7, 30, 31]), Sequence(prompt(2, 9), [4, 8, 1, 5, 33])
    expected = alone(runner, first, 8), alone(runner, second, 8)
    run(runner, [], whole(first))
    run(runner, [first], PrefillSlice(second, 0, 3, sample=False))
    run(runner, [first], PrefillSlice(second, 3, 5, sample=False))
    run(runner, [first], PrefillSlice(second, 8, 1, sample=True))
    for _ in range(4):
        run(runner, [second, first])
    for _ in range(3):
        run(runner, [second])
    assert first.tokens[11:] == expected[0]
    assert second.tokens[9:] == expected[1]


def test_a_request_resumed_by_recompute_in_other_pages_gets_the_same_tokens(runner: CpuRunner) -> None:
    expected = alone(runner, Sequence(prompt(3, 10), [1, 2, 3, 4, 5, 6]), 14)
    resumed = Sequence([*prompt(3, 10), *expected[:6]], [20, 11, 27, 13, 24, 15], prompt_tokens=10)
    run(runner, [], whole(resumed))
    for _ in range(7):
        run(runner, [resumed])
    assert resumed.tokens[10:] == expected


def test_a_prefill_on_cached_pages_gets_the_same_token(runner: CpuRunner) -> None:
    first = Sequence(prompt(4, 15), [1, 2, 3, 4])
    run(runner, [], whole(first))
    again = Sequence(prompt(4, 15), [1, 2, 3, 9])
    run(runner, [], PrefillSlice(again, 12, 3, sample=True))
    assert again.tokens == first.tokens


def test_a_step_given_up_returns_nothing_and_the_next_one_works(runner: CpuRunner) -> None:
    sequence = Sequence(prompt(5, 12), [1, 2, 3, 4, 5])
    expected = alone(runner, sequence, 1)
    asked: list[bool] = []
    runner.launch(StepBatch([], [whole(sequence)]), lambda: asked.append(True) or len(asked) == 2)
    assert runner.collect() is None
    assert len(asked) == 2
    assert run(runner, [], whole(sequence)) == expected


def test_a_step_of_decodes_is_never_given_up(runner: CpuRunner) -> None:
    sequence = Sequence(prompt(5, 12), [1, 2, 3, 4, 5])
    run(runner, [], whole(sequence))
    runner.launch(StepBatch([sequence], []), lambda: True)
    assert runner.collect() is not None


def test_a_step_that_samples_nothing_returns_no_tokens(runner: CpuRunner) -> None:
    assert run(runner, [], PrefillSlice(Sequence(prompt(6, 12), [1, 2, 3]), 0, 5, sample=False)) == []


def test_steps_may_come_from_another_thread(runner: CpuRunner) -> None:
    sequence = Sequence(prompt(7, 9), [1, 2, 3])
    expected, tokens = alone(runner, sequence, 1), []
    thread = threading.Thread(target=lambda: tokens.extend(run(runner, [], whole(sequence))))
    thread.start()
    thread.join()
    assert tokens == expected


def test_a_closed_runner_refuses_steps(runner: CpuRunner) -> None:
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(StepBatch([], []))
    with pytest.raises(RuntimeError, match="without a launched step"):
        runner.collect()


@pytest.mark.parametrize(
    ("limit", "share"), [("max 100000", None), ("50000 100000", 1), ("150000 100000", 2), ("nonsense", None)]
)
def test_a_containers_quota_bounds_the_threads(limit: str, share: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (cores if share is None else min(cores, share))


def test_auto_is_a_dtype_that_the_processor_multiplies() -> None:
    assert resolve_dtype("float32") is torch.float32
    assert resolve_dtype("bfloat16") is torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert resolve_dtype("auto") is (torch.bfloat16 if native else torch.float32)


def test_a_mixed_step_in_tensors() -> None:
    decode = Sequence([5, 6, 7, 8, 9, 10], [3, 1], prompt_tokens=2)
    prefill = Sequence([20, 21, 22, 23, 24, 25, 26], [2, 7], prompt_tokens=9)
    step = StepTensors(StepBatch([decode], [PrefillSlice(prefill, 3, 3, False), PrefillSlice(decode, 0, 2, True)]), PAGE, True)
    assert step.token_ids.tolist() == [10, 23, 24, 25, 5, 6]
    assert step.sampled == [decode, decode]
    assert step.rows.tolist() == [0, 5]
    batch = step.batch
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [1 * PAGE + 1, 2 * PAGE + 3, 7 * PAGE, 7 * PAGE + 1, 3 * PAGE, 3 * PAGE + 1]
    assert batch.query_starts.tolist() == [0, 1, 4, 6]
    assert batch.context_lengths.tolist() == [6, 6, 2]
    assert batch.page_table.tolist() == [[3, 1], [2, 7], [3, 0]]
    assert batch.rope_lengths is not None
    assert batch.rope_lengths.tolist() == [6, 9, 9, 9, 2, 2]
