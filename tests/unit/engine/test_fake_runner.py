from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.fake_runner import FakeRunner, fake_token
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.types import SamplingParams, Split


@dataclass
class Sequence:
    tokens: list[int]
    pages: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(seed=5))
    request_id: str = "r"
    stop_ids: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)


def runner(clock: VirtualClock) -> FakeRunner:
    return FakeRunner(8, 2, 0.5, 0.25, clock, vocab_size=1000)


def step(device: FakeRunner, batch: StepBatch) -> list[int]:
    device.launch(batch)
    return device.collect().tokens


def test_the_next_token_depends_on_the_seed_and_every_token_so_far() -> None:
    tokens = {
        fake_token(0, [1, 2], 10**9),
        fake_token(1, [1, 2], 10**9),
        fake_token(0, [3, 2], 10**9),
        fake_token(0, [2, 1], 10**9),
    }
    assert len(tokens) == 4


def test_slices_and_decodes_sample_what_the_whole_prompt_would() -> None:
    device = runner(VirtualClock())
    sequence = Sequence([1, 2, 3, 4, 5], pages=[6, 0, 3])
    assert step(device, StepBatch([], [PrefillSlice(sequence, 0, 3, sample=False)])) == []
    assert step(device, StepBatch([], [PrefillSlice(sequence, 3, 2, sample=True)])) == [fake_token(5, [1, 2, 3, 4, 5], 1000)]
    sequence.tokens.append(9)
    assert step(device, StepBatch([sequence], [])) == [fake_token(5, [1, 2, 3, 4, 5, 9], 1000)]


def test_a_page_with_other_tokens_changes_the_next_token() -> None:
    device = runner(VirtualClock())
    sequence = Sequence([1, 2, 3], pages=[0, 1])
    step(device, StepBatch([], [PrefillSlice(Sequence([8, 8], pages=[0]), 0, 2, sample=False)]))
    assert step(device, StepBatch([], [PrefillSlice(sequence, 2, 1, sample=True)])) != [fake_token(5, [1, 2, 3], 1000)]


def test_a_step_takes_its_configured_time_on_the_given_clock() -> None:
    clock = VirtualClock()
    step(runner(clock), StepBatch([], [PrefillSlice(Sequence([1, 2, 3], pages=[0, 1]), 0, 3, sample=True)]))
    assert clock.now() == 0.5 + 3 * 0.25


def test_decodes_come_before_prefills_in_the_answer_and_logprobs_go_to_those_who_asked() -> None:
    device = runner(VirtualClock())
    first = Sequence([1], [0])
    second = Sequence([2], [1], SamplingParams(seed=5, logprobs=1))
    device.launch(StepBatch([first], [PrefillSlice(second, 0, 1, sample=True)]))
    output = device.collect()
    assert output.tokens == [fake_token(5, [1], 1000), fake_token(5, [2], 1000)]
    assert output.logprobs[0] is None
    assert output.logprobs[1] is not None
    assert [token for token, _ in output.logprobs[1].top] == output.tokens[1:]


LAST = 8  # layer


def test_a_block_and_a_decode_take_their_time_together() -> None:
    clock = VirtualClock()
    device = runner(clock)
    device.open_job(1, [PrefillSlice(Sequence([1, 2, 3, 4], pages=[0, 1]), 0, 4, sample=True)])
    device.launch_block(1, LAST, Split(4, 4))
    device.launch(StepBatch([Sequence([1], pages=[2])], []), split=Split(4, 4))
    device.collect()
    assert clock.now() == 2 * 0.5  # a decode on half of the units
    assert not device.block_done()
    device.collect_block()
    assert clock.now() == device.block_s == 2 * (0.5 + 4 * 0.25)


def test_what_a_job_wrote_is_garbage_to_others_until_its_last_block_was_collected() -> None:
    device = runner(VirtualClock())
    slices = [PrefillSlice(Sequence([1, 2], pages=[0]), 0, 2, sample=True)]
    reader = Sequence([1, 2, 3], pages=[0, 1])
    right = fake_token(5, [1, 2, 3], 1000)

    def read() -> bool:
        device.launch(StepBatch([reader], []), split=Split(4, 4))
        output = device.collect()
        assert output is not None
        return output.tokens == [right]

    device.open_job(1, slices)
    seen = []
    for end_layer in (3, LAST):
        device.launch_block(1, end_layer, Split(4, 4))
        seen.append(read())
        output = device.collect_block()
        seen.append(read())
    assert seen == [False, False, False, True]
    assert output is not None
    assert output.tokens == [fake_token(5, [1, 2], 1000)]


def test_a_dropped_job_is_forgotten_and_its_number_can_be_used_again() -> None:
    device = runner(VirtualClock())
    slices = [PrefillSlice(Sequence([1, 2], pages=[0]), 0, 2, sample=True)]
    for _ in range(2):
        device.open_job(1, slices)
        device.launch_block(1, 3, Split(4, 4))
        with pytest.raises(RuntimeError, match="in flight"):
            device.drop_job(1)
        assert device.collect_block() is None
        device.drop_job(1)


def bursting(clock: VirtualClock) -> FakeRunner:
    return FakeRunner(8, 2, 0.5, 0.25, clock, vocab_size=1000, most_steps=3)


def test_a_burst_goes_on_with_its_own_tokens_and_each_is_there_when_its_step_is_done() -> None:
    clock = VirtualClock()
    device = bursting(clock)
    sequence = Sequence([1], pages=[0, 1])
    device.launch(StepBatch([sequence], [], steps=3))
    tokens, times = [1], []
    sequence.tokens.append(77)  # what the host makes of it is of no concern
    for _ in range(3):
        output = device.collect()
        assert output is not None
        assert output.tokens == [fake_token(5, tokens, 1000)]
        tokens += output.tokens
        times.append(clock.now())
    assert times == [0.5, 1.0, 1.5]
    with pytest.raises(RuntimeError, match="without a launched step"):
        device.collect()


@pytest.mark.parametrize(
    "batch",
    [
        StepBatch([Sequence([1], [0])], [], steps=4),
        StepBatch([Sequence([1], [0], SamplingParams(logprobs=1))], [], steps=2),
        StepBatch([Sequence([1], [0])], [PrefillSlice(Sequence([1], [1]), 0, 1, sample=True)], steps=2),
    ],
    ids=["too many steps", "log probabilities", "a prefill"],
)
def test_a_burst_that_a_device_cannot_compute_is_refused(batch: StepBatch) -> None:
    with pytest.raises(RuntimeError, match="there may be 3 steps"):
        bursting(VirtualClock()).launch(batch)


def test_nothing_is_launched_before_a_burst_has_been_collected() -> None:
    device = bursting(VirtualClock())
    batch = StepBatch([Sequence([1], pages=[0, 1])], [], steps=2)
    device.launch(batch)
    device.collect()
    with pytest.raises(RuntimeError, match="1 steps of the burst before were not collected"):
        device.launch(batch)
