"""The CUDA runner over recording streams: the tokens of the CPU's in every order that events allow; what it asks of CUDA."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import PAGE, REFERENCE, recorded_runner, reference_sample, settings
from test_runner import DRAWN, GREEDY, Sequence, alone, prompt, run, whole
from tiny_models import VOCAB, save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.device.cuda.graphs import GraphContextError
from pdmux_ray.device.cuda.prefill import cut
from pdmux_ray.device.cuda.recording import RecordingStreams
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.startup import Kernels
from pdmux_ray.device.gpus import has_gpu
from pdmux_ray.engine.runner import LaneRunner, PrefillSlice, StepBatch
from pdmux_ray.errors import ConfigError
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.types import SamplingParams, Split

pytestmark = pytest.mark.cpu

HALVES = Split(4, 4)
SEEDS = range(12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Iterator[CpuRunner]:
    config = {"device": "cpu", "dtype": "float32", "page_size": PAGE, "kv_cache_gib": 0.002}
    runner = CpuRunner(model_dir, EngineConfig.model_validate(config))
    yield runner
    runner.close()


def burst(runner: CudaRunner, sequences: list[Sequence], steps: int, split: Split | None = None) -> None:
    runner.launch(StepBatch(sequences, [], steps), split=split)
    for _ in range(steps):
        output = runner.collect()
        assert output is not None
        for sequence, token in zip(sequences, output.tokens, strict=True):
            sequence.tokens.append(token)


def by_blocks(runner: CudaRunner, sequence: Sequence, splits: list[Split], job: int = 0) -> None:
    """Its prefill, a layer a block."""
    runner.open_job(job, [whole(sequence)])
    for end, split in enumerate(splits, 1):
        runner.launch_block(job, end, split)
        output = runner.collect_block()
    assert output is not None
    sequence.tokens.extend(output.tokens)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(DRAWN, logprobs=2, repetition_penalty=1.4)], ids=str)
def test_a_request_gets_the_tokens_of_the_cpu(model_dir: Path, cpu: CpuRunner, params: SamplingParams) -> None:
    runner, _ = recorded_runner(model_dir)
    sequence = Sequence(prompt(1, 21), list(range(8)), params)
    assert alone(runner, sequence, 9) == alone(cpu, sequence, 9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_gives_the_tokens_of_single_steps_at_every_split_and_batch(model_dir: Path, cpu: CpuRunner, seed: int) -> None:
    runner, _ = recorded_runner(model_dir, seed)
    sequences = [Sequence(prompt(at, 5 + at), list(range(10 * at, 10 * at + 8)), request_id=str(at)) for at in range(5)]
    expected = [alone(cpu, sequence, 18) for sequence in sequences]
    run(runner, [], *map(whole, sequences[:3]))
    run(runner, sequences[:3], *map(whole, sequences[3:]))
    for at, split in enumerate([*runner.splits, None, *runner.splits]):
        burst(runner, sequences if at % 2 else sequences[::-1], 1 + (at + seed) % 3, split)
    for sequence, tokens in zip(sequences, expected, strict=True):
        made = sequence.tokens[sequence.prompt_tokens :]
        assert len(made) >= 8
        assert made == tokens[: len(made)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prefill_by_blocks_gives_the_tokens_of_the_cpu_when_the_split_changes_with_each(
    model_dir: Path, cpu: CpuRunner, seed: int
) -> None:
    runner, _ = recorded_runner(model_dir, seed)
    sequence = Sequence(prompt(3, 37), list(range(12)))  # three passes
    expected = alone(cpu, sequence, 6)
    by_blocks(runner, sequence, [Split(6, 2), Split(8, 8), Split(2, 8)])
    burst(runner, [sequence], 3, Split(6, 2))
    burst(runner, [sequence], 2, Split(2, 6))
    assert sequence.tokens[37:] == expected


def test_a_job_may_overtake_one_that_rests_and_another_may_be_dropped(model_dir: Path, cpu: CpuRunner) -> None:
    runner, _ = recorded_runner(model_dir)
    long, short = Sequence(prompt(1, 30), list(range(8))), Sequence(prompt(2, 5), [20, 21], DRAWN)
    expected = alone(cpu, long, 1), alone(cpu, short, 1)
    runner.open_job(0, [whole(long)])
    runner.launch_block(0, 2, HALVES)
    assert runner.collect_block() is None
    runner.open_job(1, [whole(Sequence(prompt(9, 5), [22, 23]))])
    by_blocks(runner, short, [HALVES, Split(2, 6), HALVES], job=2)
    runner.drop_job(1)
    runner.launch_block(0, 3, Split(8, 8))
    output = runner.collect_block()
    assert output is not None
    assert (output.tokens, short.tokens[5:]) == expected
    assert runner._jobs == {}


def test_a_prefill_on_cached_pages_gets_the_same_token(model_dir: Path) -> None:
    runner, _ = recorded_runner(model_dir)
    first, again = Sequence(prompt(4, 15), [1, 2, 3, 4]), Sequence(prompt(4, 15), [1, 2, 3, 9])
    run(runner, [], whole(first))
    runner.open_job(0, [PrefillSlice(again, 12, 3, sample=True)])
    runner.launch_block(0, 3, HALVES)
    output = runner.collect_block()
    assert output is not None
    assert output.tokens == first.tokens[15:]


def test_tokens_that_the_host_samples_do_not_change_those_beside_them(model_dir: Path, cpu: CpuRunner) -> None:
    runner, _ = recorded_runner(model_dir)
    asking = replace(DRAWN, logprobs=3, min_tokens=4, frequency_penalty=0.5)
    sequences = [Sequence(prompt(1, 9), [1, 2, 3, 4], DRAWN, request_id="a"), Sequence(prompt(2, 9), [5, 6, 7, 8], asking)]
    expected = [alone(cpu, sequence, 5) for sequence in sequences]
    run(runner, [], *map(whole, sequences))
    for _ in range(4):
        runner.launch(StepBatch(sequences, []), split=HALVES)
        output = runner.collect()
        assert output is not None
        assert output.logprobs[0] is None
        assert output.logprobs[1] is not None
        assert len(output.logprobs[1].top) == 3
        for sequence, token in zip(sequences, output.tokens, strict=True):
            sequence.tokens.append(token)
    assert [sequence.tokens[9:] for sequence in sequences] == expected


def test_a_burst_beyond_the_context_or_the_pages_of_a_request_touches_nobody_else(model_dir: Path, cpu: CpuRunner) -> None:
    """The host has ended such a request and throws its tokens away; its neighbour's stay right."""
    runner, _ = recorded_runner(model_dir, context_length=16)
    ending, other = Sequence(prompt(1, 13), [9, 3, 4, 5], request_id="a"), Sequence(prompt(2, 6), [0, 1, 2], request_id="b")
    expected = alone(cpu, other, 6)
    run(runner, [], whole(ending), whole(other))
    burst(runner, [ending, other], 2)
    ending.pages = [9, 3, 4]  # of the four that the rest would need; and its context ends after the first step
    burst(runner, [ending, other], 3)
    assert other.tokens[6:] == expected


def test_a_burst_that_fails_has_ended_and_the_next_one_works(model_dir: Path, cpu: CpuRunner) -> None:
    runner, _ = recorded_runner(model_dir)
    bad, good = Sequence([5, 10**6], [1]), Sequence(prompt(6, 9), [2, 3, 4, 5])
    expected = alone(cpu, good, 4)
    run(runner, [], whole(good))
    runner.launch(StepBatch([bad], [], 3), split=HALVES)
    with pytest.raises(IndexError):
        runner.collect()
    with pytest.raises(RuntimeError, match="without a launched step"):
        runner.collect()
    burst(runner, [good], 3, HALVES)
    assert good.tokens[9:] == expected


def test_a_step_given_up_returns_nothing_and_the_next_one_works(model_dir: Path, cpu: CpuRunner) -> None:
    runner, _ = recorded_runner(model_dir)
    sequence = Sequence(prompt(5, 12), [1, 2, 3, 4, 5])
    asked: list[bool] = []
    runner.launch(StepBatch([], [whole(sequence)]), lambda: asked.append(True) or len(asked) == 2)
    assert runner.collect() is None
    assert len(asked) == 2
    expected = alone(cpu, sequence, 1)
    assert run(runner, [], whole(sequence)) == expected


def test_a_step_in_one_pass_is_launched_only_a_little_ahead_of_the_device(model_dir: Path) -> None:
    """So that it can be given up: when the last layer is asked about, the first one has been computed."""
    runner, streams = recorded_runner(model_dir)
    before, computed = streams.now_s, list[float]()
    runner.launch(StepBatch([], [whole(Sequence(prompt(5, 12), [1, 2, 3]))]), lambda: bool(computed.append(streams.now_s)))
    runner.collect()
    assert len(computed) == runner.layers
    assert computed[-1] > before


def test_a_decode_step_is_one_copy_one_replay_and_one_copy_back(model_dir: Path) -> None:
    runner, streams = recorded_runner(model_dir)
    sequences = [Sequence(prompt(at, 9), [3 * at, 3 * at + 1, 3 * at + 2], request_id=str(at)) for at in range(5)]
    run(runner, [], *map(whole, sequences))
    burst(runner, sequences, 1, HALVES)
    before = streams.calls()
    burst(runner, sequences, 1, HALVES)
    assert streams.calls() - before == Counter(run=2, replay=1, record=1)
    before = streams.calls()
    burst(runner, sequences, 3, HALVES)
    assert streams.calls() - before == Counter(run=4, replay=3, record=3)


def test_levels_and_buckets_have_a_graph_each_and_no_step_captures_one(model_dir: Path) -> None:
    runner, streams = recorded_runner(model_dir)
    captured = streams.calls()["capture"]
    assert captured == 1 + (1 + len(streams.splits)) * 3  # one to see how large they are; the whole device is a level, too
    alone(runner, Sequence(prompt(1, 9), [1, 2, 3, 4]), 5)
    assert streams.calls()["capture"] == captured


def test_a_kernel_that_escapes_its_partition_is_an_error_that_says_what_to_do(model_dir: Path) -> None:
    with pytest.raises(GraphContextError, match=r"8 SMs, batch 6, has kernels in 1 other contexts.*install .*gpu\.txt"):
        CudaRunner(model_dir, settings(), RecordingStreams(stray={99}), REFERENCE)


def test_a_check_goes_on_with_a_kernel_outside_its_partition_and_is_told_of_it_once(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        CudaRunner(model_dir, settings(), RecordingStreams(stray={99}), REFERENCE, strict=False)
    assert caplog.text.count("has kernels in 1 other contexts") == 1
    assert "the first of 12" in caplog.text


def test_contexts_that_the_driver_does_not_name_are_told_of(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CudaRunner(model_dir, settings(), RecordingStreams(stray={0}), REFERENCE)
    assert "of 12 of 12 decode graphs the driver does not name the context" in caplog.text


def test_what_a_lane_cannot_do_is_refused_with_a_reason(model_dir: Path) -> None:
    runner, _ = recorded_runner(model_dir)
    sequence = Sequence(prompt(9, 9), [1, 2, 3])
    with pytest.raises(ValueError, match="decodes only"):
        runner.launch(StepBatch([], [whole(sequence)]), split=HALVES)
    with pytest.raises(ValueError, match="a step with prefills is a single one"):
        runner.launch(StepBatch([], [whole(sequence)], 2))
    with pytest.raises(ValueError, match="the device is not divided 5/3; the splits are 6/2, 4/4, 2/6"):
        runner.launch(StepBatch([sequence], []), split=Split(5, 3))
    with pytest.raises(ValueError, match="a burst of 4 steps: it may have 1 to 3"):
        runner.launch(StepBatch([sequence], [], 4))
    with pytest.raises(ValueError, match="a burst of 2 steps"):
        runner.launch(StepBatch([Sequence(prompt(9, 9), [1, 2, 3], SamplingParams(logprobs=1))], [], 2))
    with pytest.raises(ValueError, match="7 decodes in a step, but the largest bucket has 6"):
        runner.launch(StepBatch([sequence] * 7, []))
    with pytest.raises(RuntimeError, match="without a launched step"):
        runner.collect()
    with pytest.raises(RuntimeError, match="without a block"):
        runner.collect_block()
    runner.launch(StepBatch([sequence], []))
    with pytest.raises(RuntimeError, match="before the one before it was collected"):
        runner.launch(StepBatch([sequence], []))
    runner.collect()
    runner.open_job(0, [whole(sequence)])
    with pytest.raises(ValueError, match="open already"):
        runner.open_job(0, [whole(sequence)])
    with pytest.raises(ValueError, match="through 0 of 3 layers"):
        runner.launch_block(0, 4, HALVES)
    runner.launch_block(0, 1, HALVES)
    with pytest.raises(RuntimeError, match="in flight"):
        runner.launch_block(0, 2, HALVES)
    with pytest.raises(RuntimeError, match="in flight"):
        runner.drop_job(0)
    with pytest.raises(RuntimeError, match="needs every unit"):
        runner.launch(StepBatch([sequence], []))


def test_what_a_block_took_is_the_device_s_time_from_its_launch_to_its_end(model_dir: Path) -> None:
    runner, _ = recorded_runner(model_dir)
    assert runner.block_done()
    runner.open_job(0, [whole(Sequence(prompt(9, 9), [1, 2, 3]))])
    runner.launch_block(0, 1, HALVES)
    while not runner.block_done():
        pass
    assert runner.collect_block() is None
    assert runner.block_s > 0


def test_every_prefill_stream_has_multiplied_matrices_of_each_length_before_the_first_request(model_dir: Path) -> None:
    """cuBLAS loads a kernel when it is first wanted: the output head's, too, and those of lengths between the extremes."""
    seen: dict[int, set[int]] = {}

    class Noting(ReferenceOps):
        def __init__(self, kv_pool: torch.Tensor, scratch: Scratch, sms: int) -> None:
            super().__init__(kv_pool)
            self.lengths = seen.setdefault(sms, set()) if scratch.max_tokens == 300 else set()

        def linear(self, x: torch.Tensor, packed: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
            out = super().linear(x, packed, residual)
            self.lengths |= {len(x)} if residual is None else set()
            if out.shape[1] == VOCAB:
                self.lengths.add(0)  # the output head
            return out

    kernels = Kernels(Noting, reference_sample)
    recorded_runner(model_dir, kernels=kernels, max_prefill_tokens=300, kv_cache_gib=0.02)
    assert set(seen) == {2, 4, 6, 8}
    for lengths in seen.values():
        assert lengths >= {0, 64, 256, 300}


def test_a_job_that_has_ended_leaves_its_memory_to_the_next_one(model_dir: Path) -> None:
    """There is room for one job of the longest context, and two may come one after the other."""
    runner, _ = recorded_runner(model_dir)
    sequence = Sequence(prompt(9, 9), [1, 2, 3])
    runner.open_job(0, [whole(sequence)])
    hidden = weakref.ref(runner._jobs[0].hidden)
    for end in (1, 3):
        runner.launch_block(0, end, HALVES)
        runner.collect_block()
    assert hidden() is None
    assert runner.block_s > 0


def test_closing_waits_for_what_is_in_flight_and_works_twice(model_dir: Path) -> None:
    runner, streams = recorded_runner(model_dir)
    sequence = Sequence(prompt(9, 9), [1, 2, 3])
    runner.open_job(0, [whole(sequence)])
    runner.launch_block(0, 2, HALVES)
    runner.launch(StepBatch([sequence], [], 2), split=HALVES)
    runner.close()
    runner.close()
    assert streams.pending() == 0
    with pytest.raises(RuntimeError, match="closed"):
        runner.open_job(1, [])
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(StepBatch([sequence], []))
    with pytest.raises(RuntimeError, match="without a launched step"):
        runner.collect()


def test_it_is_a_runner_of_lanes_with_a_spare_page(model_dir: Path) -> None:
    runner, _ = recorded_runner(model_dir)
    assert isinstance(runner, LaneRunner)
    assert (runner.units, runner.layers, runner.most_steps) == (8, 3, 3)
    assert runner.pages == runner.layout.pages - 1
    assert not hasattr(runner, "kv_memory")  # no topology


def test_the_pool_takes_its_share_of_what_is_free(model_dir: Path) -> None:
    streams = RecordingStreams(free_bytes=2**20)
    runner = CudaRunner(model_dir, settings(kv_cache_gib=None, cuda={"kv_share": 0.5}), streams, REFERENCE)
    assert 0.4 * 2**20 < runner.layout.total_bytes <= 0.5 * 2**20


def test_a_pool_that_does_not_fit_or_holds_no_page_is_an_error_that_says_so(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gib is 0.002, but .* GiB are free"):
        CudaRunner(model_dir, settings(), RecordingStreams(free_bytes=2**20), REFERENCE)
    with pytest.raises(ConfigError, match="holds no page beside the spare one"):
        CudaRunner(model_dir, settings(kv_cache_gib=4e-6), RecordingStreams(), REFERENCE)


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_an_error_that_names_the_config_for_a_cpu(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU.*configs/cpu-mux.yaml"):
        build_runner(model_dir, settings())


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_auto_is_the_cpu_where_there_is_no_gpu(model_dir: Path) -> None:
    runner = build_runner(model_dir, settings(device="auto"))
    assert isinstance(runner, CpuRunner)
    runner.close()


def test_a_device_without_a_gpu_computes_in_float32_unless_it_is_told(model_dir: Path) -> None:
    runner, _ = recorded_runner(model_dir, dtype="auto")
    assert runner.dtype is torch.float32
    runner, _ = recorded_runner(model_dir, dtype="float16")
    assert runner.dtype is torch.float16


def test_float16_is_for_gpus(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="float16 is for GPUs"):
        build_runner(model_dir, settings(device="cpu", dtype="float16"))


def test_a_step_longer_than_the_buffers_is_cut_into_passes() -> None:
    decode, first, second = Sequence([1, 2], [0]), Sequence(prompt(1, 9), [1, 2, 3]), Sequence(prompt(2, 5), [4, 5])
    passes = cut(StepBatch([decode], [whole(first), whole(second)]), 6)
    assert [len(part.decodes) for part in passes] == [1, 0, 0]
    assert [[(p.sequence is first, p.start, p.tokens, p.sample) for p in part.prefills] for part in passes] == [
        [(True, 0, 5, False)],
        [(True, 5, 4, True), (False, 0, 2, False)],
        [(False, 2, 3, True)],
    ]
