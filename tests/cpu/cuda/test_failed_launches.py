"""What fails or ends midway leaves nothing at work on the device: whoever is told of it gives its memory to others."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from recorded import recorded_runner
from test_runner import Sequence, prompt, run, whole
from tiny_models import save_tiny

from pdmux_ray.device.cuda.recording import RecordingStream
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.streams import Work
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu

HALVES = Split(4, 4)
LANES = {"decodes": "decode", "a block": "prefill", "a step in one pass": "prefill"}


def launch(runner: CudaRunner, what: str, sequence: Sequence) -> None:
    if what == "decodes":
        runner.launch(StepBatch([sequence], [], 3), split=HALVES)
    elif what == "a block":
        runner.launch_block(0, 3, HALVES)
    else:
        runner.launch(StepBatch([], [whole(sequence)]))


@pytest.mark.parametrize("what", LANES)
def test_what_was_launched_before_an_error_has_ended_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    runner, streams = recorded_runner(save_tiny("llama", tmp_path))
    sequence = Sequence(prompt(1, 12), [1, 2, 3, 4])
    expected = run(runner, [], whole(sequence))
    sequence.tokens.pop()
    if what == "a block":
        runner.open_job(0, [whole(sequence)])
    put, turns = RecordingStream.run, count()

    def refuse(stream: RecordingStream, work: Work) -> None:
        if stream.name.startswith(LANES[what]) and next(turns) == 1:
            raise RuntimeError("out of memory")
        put(stream, work)

    with monkeypatch.context() as patch:
        patch.setattr(RecordingStream, "run", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            launch(runner, what, sequence)
    assert streams.pending() == 0
    assert run(runner, [], whole(sequence)) == expected
    runner.close()


def test_a_block_that_fails_before_its_job_s_last_has_ended_the_job_when_its_time_is_asked_for(tmp_path: Path) -> None:
    runner, _ = recorded_runner(save_tiny("llama", tmp_path))
    runner.open_job(0, [whole(Sequence([5, 10**6], [1]))])
    runner.launch_block(0, 1, HALVES)
    assert runner.collect_block() is None
    with pytest.raises(IndexError):
        _ = runner.block_s
    runner.open_job(0, [whole(Sequence(prompt(1, 9), [1, 2, 3]))])
    runner.close()


def test_closing_waits_for_the_inputs_of_a_job_that_never_began(tmp_path: Path) -> None:
    runner, streams = recorded_runner(save_tiny("llama", tmp_path))
    runner.open_job(0, [whole(Sequence(prompt(1, 9), [1, 2, 3]))])
    runner.close()
    assert streams.pending() == 0


def test_a_job_of_many_sequences_with_long_prefixes_asks_for_no_memory_of_the_host(tmp_path: Path) -> None:
    runner, _ = recorded_runner(save_tiny("llama", tmp_path), context_length=16)
    assert runner._parts is not None
    lane = runner._parts.prefills
    reserved = lane._staging.data_ptr()
    pieces = [PrefillSlice(Sequence(prompt(row, 16), [1, 2, 3, 4]), 15, 1, True) for row in range(5)]
    runner.open_job(0, [PrefillSlice(Sequence(prompt(5, 16), [1, 2, 3, 4]), 5, 11, True), *pieces])
    assert lane._staging.data_ptr() == reserved
    runner.close()
