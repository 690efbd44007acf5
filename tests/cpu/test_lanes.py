"""The CPU runner's lanes: prefills by blocks of layers beside decodes give the tokens that one pass gives, on any units."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_runner import PAGE, Sequence, alone, prompt, run, whole
from tiny_models import save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.cores import neighbouring_cores
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.device.cpu.workers import MOST_SPLITS, splits_of, use_threads
from pdmux_ray.engine.limits import with_lanes
from pdmux_ray.engine.runner import StepBatch
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Mode, Split

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:slow attention"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="lanes need two cores"),
]

HALVES = Split(1, 1)
MODELS = {"native": "llama", "torch": "llama, head_dim as hidden / heads"}  # the kernels take no head of 8


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(MODELS[request.param], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[CpuRunner]:
    """Of two cores; leaves no thread behind."""
    use_threads(2)
    torch.zeros(2**20).add_(1)  # the calling thread's own team stays for ever
    before = native_threads()
    runner = make_runner(model_dir, request.param)
    assert native_threads() >= before + 4  # three workers, and a second thread for the one on both cores
    yield runner
    runner.close()
    deadline = time.monotonic() + 5
    while native_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a worker's team ends by itself after its worker
    assert native_threads() <= before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")] == []


def make_runner(model_dir: Path, dtype: str = "float32", mode: Mode = Mode.SPLIT, threads: int = 2) -> CpuRunner:
    settings = {"device": "cpu", "dtype": dtype, "page_size": PAGE, "kv_cache_gib": 0.002, "mode": mode, "threads": threads}
    runner = build_runner(model_dir, EngineConfig.model_validate(settings))
    assert isinstance(runner, CpuRunner)
    return runner


def decode(runner: CpuRunner, sequences: list[Sequence]) -> None:
    output = runner.collect()
    assert output is not None
    for sequence, token in zip(sequences, output.tokens, strict=True):
        sequence.tokens.append(token)


def prefill(runner: CpuRunner, sequence: Sequence, *ends: int, split: Split = HALVES, job: int = 0) -> None:
    """The whole prompt, in blocks that end at `ends` and at the last layer."""
    runner.open_job(job, [whole(sequence)])
    for end in [*ends, runner.layers]:
        runner.launch_block(job, end, split)
        output = runner.collect_block()
    assert output is not None
    sequence.tokens.extend(output.tokens)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_layers_beside_decodes_give_the_tokens_of_one_pass(runner: CpuRunner, seed: int) -> None:
    """Splits change with every step: disjoint, capped, and each lane on every unit."""
    rng = random.Random(seed)
    running = [Sequence(prompt(seed, 11), [9, 2, 7, 30, 31, 40], request_id="a")]
    new = [
        Sequence(prompt(seed + 50, 20), [4, 8, 1, 5, 33, 34, 35], request_id="b"),
        Sequence(prompt(seed + 90, 6), [50, 51, 52], request_id="c"),
    ]
    expected = {s.request_id: alone(runner, s, 5) for s in [*running, *new]}
    run(runner, [], whole(running[0]))
    runner.open_job(7, [whole(sequence) for sequence in new])
    done = 0
    for step in range(4):
        if runner.block_done() and done < runner.layers:
            if done:
                assert runner.collect_block() is None
            done = rng.randint(done + 1, runner.layers)
            runner.launch_block(7, done, rng.choice([HALVES, Split(2, 2)]))
        runner.launch(StepBatch(running, []), split=rng.choice([HALVES, Split(1, 2), Split(2, 2)]))
        decode(runner, running)
        assert len(running[0].tokens) == 12 + step + 1
    while (output := runner.collect_block()) is None:
        runner.launch_block(7, done := done + 1, HALVES)
    for sequence, token in zip(new, output.tokens, strict=True):
        sequence.tokens.append(token)
    for _ in range(4):
        runner.launch(StepBatch(new, []), split=rng.choice([HALVES, Split(2, 2)]))
        decode(runner, new)
    assert {s.request_id: s.tokens[s.prompt_tokens :] for s in [*running, *new]} == expected


def test_a_job_may_overtake_one_that_rests_between_two_blocks(runner: CpuRunner) -> None:
    long, short = Sequence(prompt(1, 30), list(range(8))), Sequence(prompt(2, 5), [20, 21])
    expected = alone(runner, long, 1), alone(runner, short, 1)
    runner.open_job(0, [whole(long)])
    runner.launch_block(0, 2, HALVES)
    assert runner.collect_block() is None
    prefill(runner, short, 1, job=1)
    runner.launch_block(0, runner.layers, HALVES)
    output = runner.collect_block()
    assert output is not None
    assert (output.tokens, short.tokens[5:]) == expected


def test_a_prefill_is_handed_over_only_when_its_last_block_has_ended(runner: CpuRunner) -> None:
    """The lane is held up until after the wait for it has begun: without that wait the decode would read unwritten pages."""
    sequence = Sequence(prompt(3, 14), [1, 2, 3, 4, 5])
    expected = alone(runner, replace(sequence, pages=[11, 12, 13, 14, 15], tokens=list(sequence.tokens)), 3)
    opened = threading.Event()
    assert runner._workers is not None
    runner._workers.prefill(HALVES).submit(opened.wait)
    runner.open_job(0, [whole(sequence)])
    runner.launch_block(0, runner.layers, HALVES)
    assert not runner.block_done()
    threading.Timer(0.05, opened.set).start()
    output = runner.collect_block()
    assert opened.is_set()
    assert output is not None
    sequence.tokens.extend(output.tokens)
    for _ in range(2):
        runner.launch(StepBatch([sequence], []), split=HALVES)
        decode(runner, [sequence])
    assert sequence.tokens[14:] == expected


def test_decodes_do_not_wait_for_the_block_in_flight(runner: CpuRunner) -> None:
    sequence, other = Sequence(prompt(4, 9), [1, 2, 3]), Sequence(prompt(5, 9), [4, 5, 6])
    run(runner, [], whole(sequence))
    opened = threading.Event()
    assert runner._workers is not None
    runner._workers.prefill(HALVES).submit(opened.wait)
    runner.open_job(0, [whole(other)])
    runner.launch_block(0, 1, HALVES)
    for split in (HALVES, Split(1, 2)):
        runner.launch(StepBatch([sequence], []), split=split)
        decode(runner, [sequence])
    assert not runner.block_done()
    opened.set()
    assert runner.collect_block() is None
    assert runner.block_s > 0


def test_what_a_lane_fails_with_comes_out_where_its_result_would(runner: CpuRunner) -> None:
    bad, good = Sequence([5, 10**6], [1]), Sequence(prompt(6, 9), [2, 3, 4])
    expected = alone(runner, good, 2)
    runner.launch(StepBatch([bad], []), split=HALVES)
    with pytest.raises(IndexError):
        runner.collect()
    runner.open_job(0, [whole(bad)])
    runner.launch_block(0, 1, HALVES)
    with pytest.raises(IndexError):
        runner.collect_block()
    prefill(runner, good, job=0)  # the number is free again: that job has ended
    runner.launch(StepBatch([good], []), split=HALVES)
    decode(runner, [good])
    assert good.tokens[9:] == expected


def test_a_dropped_job_leaves_its_pages_to_others(runner: CpuRunner) -> None:
    sequence = Sequence(prompt(7, 9), [1, 2, 3])
    expected = alone(runner, sequence, 1)
    runner.open_job(0, [whole(Sequence(prompt(8, 12), [1, 2, 3]))])
    runner.launch_block(0, 1, HALVES)
    with pytest.raises(RuntimeError, match="in flight"):
        runner.drop_job(0)
    assert runner.collect_block() is None
    runner.drop_job(0)
    prefill(runner, sequence, job=0)
    assert sequence.tokens[9:] == expected


def test_what_a_lane_cannot_do_is_refused_with_a_reason(runner: CpuRunner) -> None:
    sequence = Sequence(prompt(9, 9), [1, 2, 3])
    with pytest.raises(ValueError, match="decodes only"):
        runner.launch(StepBatch([], [whole(sequence)]), split=HALVES)
    with pytest.raises(ValueError, match="no decode lane has 3 units; there are lanes of 1, 2"):
        runner.launch(StepBatch([sequence], []), split=Split(1, 3))
    with pytest.raises(RuntimeError, match="without a block"):
        runner.collect_block()
    runner.open_job(0, [whole(sequence)])
    with pytest.raises(ValueError, match="open already"):
        runner.open_job(0, [whole(sequence)])
    with pytest.raises(ValueError, match="through 0 of 3 layers"):
        runner.launch_block(0, 4, HALVES)
    runner.launch_block(0, 1, HALVES)
    with pytest.raises(RuntimeError, match="in flight"):
        runner.launch_block(0, 2, HALVES)
    with pytest.raises(RuntimeError, match="needs every unit"):
        runner.launch(StepBatch([sequence], []))
    assert runner.collect_block() is None


def test_closing_waits_for_the_block_in_flight(runner: CpuRunner) -> None:
    runner.open_job(0, [whole(Sequence(prompt(9, 40), list(range(10))))])
    runner.launch_block(0, runner.layers, HALVES)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.open_job(1, [])


def test_each_worker_has_its_own_cores_and_a_thread_for_each(runner: CpuRunner) -> None:
    def place() -> tuple[list[int], int]:
        return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

    first, second = neighbouring_cores()[:2]
    workers = runner._workers
    assert workers is not None
    assert workers.prefill(HALVES).submit(place).result() == ([first], 1)
    assert workers.decode(HALVES).submit(place).result() == ([second], 1)
    assert workers.decode(Split(1, 2)).submit(place).result() == (sorted([first, second]), 2)
    assert workers.decode(Split(2, 2)) is workers.prefill(Split(2, 2))


def test_a_mode_of_one_pass_starts_no_workers_until_a_lane_is_used(model_dir: Path) -> None:
    runner, sequence = make_runner(model_dir, mode=Mode.CHUNKED), Sequence(prompt(1, 5), [1, 2])
    assert runner._workers is None
    assert runner.splits == (HALVES,)
    prefill(runner, sequence)
    assert runner._workers is not None
    runner.close()


def test_one_core_has_no_splits_and_shares_its_time(model_dir: Path) -> None:
    runner, sequence = make_runner(model_dir, mode=Mode.TIME_SHARED, threads=1), Sequence(prompt(1, 5), [1, 2])
    assert (runner.units, runner.splits) == (1, ())
    for mode in (Mode.SPLIT, Mode.CAPPED):
        with pytest.raises(ConfigError, match=f"mode: {mode.value} needs two units.*or use auto, time_shared"):
            with_lanes(runner, mode)
    assert with_lanes(runner, Mode.AUTO) is runner
    expected = alone(runner, sequence, 1)
    prefill(runner, sequence, 1, split=Split(1, 1))
    assert sequence.tokens[5:] == expected
    runner.close()


@pytest.mark.parametrize("units", [1, 2, 3, 16, 17, 64, 255])
def test_splits_are_disjoint_and_few_and_begin_with_the_fewest_decode_units(units: int) -> None:
    splits = splits_of(units)
    assert len(splits) == min(units - 1, len(splits)) < MOST_SPLITS + 1
    assert all(s.prefill_units + s.decode_units == units and min(s.prefill_units, s.decode_units) >= 1 for s in splits)
    decode_units = [s.decode_units for s in splits]
    assert decode_units == sorted(set(decode_units))
    assert bool(splits) == (units > 1)


def test_threads_of_one_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores with two threads each, numbered as x86 machines do; one of another package; one that says nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 8})
    for cpu, (package, core) in {0: (0, 0), 1: (0, 1), 2: (0, 2), 4: (0, 0), 5: (0, 1), 3: (1, 0)}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert neighbouring_cores(tmp_path) == [8, 0, 4, 1, 5, 2, 3]
