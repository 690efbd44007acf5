"""Each event that orders the lanes is needed: left out, some order of the streams gives wrong tokens. Kept, none does.

A wait is left out by the streams (`RecordingStreams(forget=…)`), so the runner under test is the real one but for that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import PAGE, keep_all, recorded_runner
from test_runner import GREEDY, Sequence, alone, prompt, run, whole
from tiny_models import save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.device.cuda.recording import Forget
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu

SEEDS = range(20)
SPLIT, OTHER = Split(6, 2), Split(4, 4)
FIRST = Sequence(prompt(1, 13), [1, 2, 3, 4, 5, 6], GREEDY, request_id="first")
SECOND = Sequence(prompt(2, 10), [11, 12, 13, 14, 15, 16], GREEDY, request_id="second")

Scenario = Callable[[CudaRunner], list[int]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Iterator[dict[str, list[int]]]:
    config = {"device": "cpu", "dtype": "float32", "page_size": PAGE, "kv_cache_gib": 0.002}
    runner = CpuRunner(model_dir, EngineConfig.model_validate(config))
    yield {sequence.request_id: alone(runner, sequence, 8) for sequence in (FIRST, SECOND)}
    runner.close()


def fresh(sequence: Sequence) -> Sequence:
    return replace(sequence, tokens=list(sequence.tokens), pages=list(sequence.pages))


def decode(runner: CudaRunner, sequence: Sequence, steps: int, split: Split) -> None:
    for _ in range(steps):
        runner.launch(StepBatch([sequence], []), split=split)
        output = runner.collect()
        assert output is not None
        sequence.tokens.extend(output.tokens)


def hand_off(runner: CudaRunner) -> list[int]:
    """All of a prompt but its last token is prefilled: no sample, so the host waits for nothing. Then it decodes."""
    sequence = fresh(FIRST)
    runner.open_job(0, [PrefillSlice(sequence, 0, 12, sample=False)])
    runner.launch_block(0, 3, SPLIT)
    runner.collect_block()
    decode(runner, sequence, 4, SPLIT)
    return sequence.tokens[13:]


def change_of_split(runner: CudaRunner) -> list[int]:
    """A job whose blocks run on different partitions."""
    sequence = fresh(FIRST)
    runner.open_job(0, [whole(sequence)])
    for end, split in ((1, SPLIT), (2, OTHER), (3, SPLIT)):
        runner.launch_block(0, end, split)
        output = runner.collect_block()
    assert output is not None
    return output.tokens


def inputs_of_a_job(runner: CudaRunner) -> list[int]:
    sequence = fresh(FIRST)
    runner.open_job(0, [whole(sequence)])
    runner.launch_block(0, 3, SPLIT)
    output = runner.collect_block()
    assert output is not None
    return output.tokens


def inputs_of_a_step_in_one_pass(runner: CudaRunner) -> list[int]:
    return run(runner, [], whole(fresh(FIRST)))


def pages_of_a_dropped_job_for_a_decode(runner: CudaRunner) -> list[int]:
    """A job that nobody wants any more is dropped after its first block; its pages go to a request that decodes into them."""
    sequence = fresh(FIRST)
    run(runner, [], whole(sequence))
    runner.open_job(0, [whole(Sequence(prompt(3, 16), [20, 21, 22, 23]))])
    runner.launch_block(0, 2, SPLIT)
    runner.collect_block()
    runner.drop_job(0)
    sequence.pages[3:] = [20, 21, 22]  # of which it has written nothing yet
    sequence.tokens.pop()
    decode(runner, sequence, 1, SPLIT)  # its KV goes to page 20, where the dropped job may write still
    decode(runner, sequence, 6, SPLIT)
    return sequence.tokens[13:]


def pages_of_a_dropped_job_for_a_prefill(runner: CudaRunner) -> list[int]:
    sequence = fresh(FIRST)
    runner.open_job(0, [whole(Sequence(prompt(3, 16), sequence.pages[:4]))])
    runner.launch_block(0, 2, SPLIT)
    runner.collect_block()
    runner.drop_job(0)
    run(runner, [], whole(sequence))
    decode(runner, sequence, 5, OTHER)
    return sequence.tokens[13:]


def after(waiting: str, recorded: str) -> Forget:
    """Leaves out the waits of streams of one lane for events of another one."""
    return lambda stream, of: stream.startswith(waiting) and of.startswith(recorded)


NEEDED: dict[str, tuple[Scenario, Forget]] = {
    "decodes follow the prefill that they read": (hand_off, after("decode", "prefill")),
    "a block follows the one before it, on another split": (change_of_split, after("prefill", "prefill")),
    "a job's first block follows the copy of its inputs": (inputs_of_a_job, after("prefill", "copies")),
    "a step in one pass follows the copy of its inputs": (inputs_of_a_step_in_one_pass, after("prefill", "copies")),
    "decodes follow a dropped job's writes": (pages_of_a_dropped_job_for_a_decode, after("decode", "prefill")),
    # Its own stream's wait, or that of the copy of its inputs: each alone would do for pages.
    "a prefill follows a dropped job's writes": (pages_of_a_dropped_job_for_a_prefill, after("", "prefill")),
}


def outcomes(model_dir: Path, scenario: Scenario, forget: Forget) -> Iterator[list[int] | str]:
    """Of every seed: the tokens, or what went wrong before there were any."""
    for seed in SEEDS:
        runner, _ = recorded_runner(model_dir, seed, forget)
        try:
            yield scenario(runner)
        except (IndexError, RuntimeError) as error:  # inputs that were not there
            yield str(error)


@pytest.mark.parametrize("name", NEEDED)
def test_with_every_wait_all_orders_give_the_tokens_of_the_cpu(
    model_dir: Path, expected: dict[str, list[int]], name: str
) -> None:
    for tokens in outcomes(model_dir, NEEDED[name][0], keep_all):
        assert tokens == expected["first"][: len(tokens)]
        assert tokens


@pytest.mark.parametrize("name", NEEDED)
def test_without_this_wait_some_order_gives_wrong_tokens(model_dir: Path, expected: dict[str, list[int]], name: str) -> None:
    scenario, forget = NEEDED[name]
    assert any(tokens != expected["first"][: len(tokens)] for tokens in outcomes(model_dir, scenario, forget))
