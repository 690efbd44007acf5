"""A burst: decode steps that the device is given at once. What others see is as if they had been given one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import fake_token
from pdmux_ray.engine.runner import GiveUp, StepBatch, StepOutput, never
from pdmux_ray.engine.timeline import Step
from pdmux_ray.errors import IntegrityError
from pdmux_ray.policy.decisions import BurstReason, Chunk, StepPlan, StepReason
from pdmux_ray.types import FinishReason, Mode, NewRequest, Split

from .lane_world import LAYERS, STEP_S, TOKEN_S, UNITS, Script, assert_right, begin, both, lanes_of, use
from .test_lanes import Learner
from .test_schedules import drain
from .world import PAGE, VOCAB, Log, StrictRunner, Worlds, expected, limits, request

MOST = 4
AUTO = limits(mode=Mode.AUTO, multiplex=MultiplexConfig(itl_s=1.0, ttft_s=10.0))


class Watched(StrictRunner):
    """`meanwhile` is called with the number of each decode step, from 1 on, while it is computed."""

    def __init__(self, clock: Clock, pages: int = 64) -> None:
        super().__init__(pages, PAGE, STEP_S, TOKEN_S, clock, vocab_size=VOCAB, layers=LAYERS, units=UNITS, most_steps=MOST)
        self.bursts: list[int] = []  # steps of each launch
        self.begun = 0
        self.meanwhile: Callable[[int], None] = lambda step: None

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        super().launch(batch, give_up, split)
        self.bursts.append(batch.steps)

    def collect(self) -> StepOutput | None:
        self.begun += 1
        self.meanwhile(self.begun)
        return super().collect()


class Breaks(Watched):
    """In the third decode step."""

    def collect(self) -> StepOutput | None:
        output = super().collect()
        if self.begun == 3:
            self._burst = None
            raise RuntimeError("illegal memory access")
        return output


def reading(worlds: Worlds, *requests: NewRequest, kind: type[Watched] = Watched) -> tuple[Engine, Log, Watched]:
    """An engine in which these have their first tokens, and the next step of which is the device's first decode step."""
    clock = VirtualClock()
    device = kind(clock)
    engine, log = worlds(AUTO, runner=lambda _: device, clock=clock, costs=Learner())
    for new in requests:
        engine.submit(new)
    while not all(log.tokens(new.request_id) for new in requests):
        engine.step()
    device.bursts, device.begun = [], 0
    return engine, log, device


def stopping(name: str, position: int, prompt: Sequence[int] = (1, 2, 3)) -> NewRequest:
    """Ends with its token at this position, counted from 0, which nobody can foresee."""
    for seed in range(99):
        tokens, _ = expected(request(name, prompt, max_tokens=30, seed=seed), AUTO)
        if tokens[position] not in tokens[:position]:
            return request(name, prompt, max_tokens=30, seed=seed, stop_token_ids=(tokens[position],))
    raise AssertionError("no seed does it")


def test_a_request_that_decodes_alone_is_computed_in_bursts(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, new := request("r", max_tokens=1 + 4 + 4 + 2))
    drain(engine)
    assert device.bursts == [4, 4, 2]
    assert_right(log, engine, new)
    assert engine.counters.bursts_by_reason[BurstReason.FULL] == 2
    assert engine.counters.bursts_by_reason[BurstReason.ENDS] == 1
    assert engine.counters.steps_by_reason[StepReason.DECODE_ONLY] == 10


def test_every_token_is_told_before_the_next_step_of_its_burst_is_waited_for(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, request("r", max_tokens=9))
    began_s = device._clock.now()
    told: list[tuple[int, float]] = []
    device.meanwhile = lambda step: told.append((len(log.tokens("r")), device._clock.now() - began_s))
    engine.step()
    assert device.bursts == [4]
    assert told == [(1 + step, pytest.approx(step * STEP_S)) for step in range(4)]


def test_the_step_under_way_is_as_old_as_the_step_and_not_as_its_burst(worlds: Worlds) -> None:
    engine, _, device = reading(worlds, request("r", max_tokens=9))
    ages: list[float] = []
    device.meanwhile = lambda step: ages.append(engine.load().step_age_s)
    engine.step()
    assert ages == [0.0] * 4


def test_each_step_of_a_burst_is_in_the_timeline_with_its_own_time_and_why_they_were_so_many(worlds: Worlds) -> None:
    engine, _, _ = reading(worlds, request("r", max_tokens=9))
    first = engine.timeline.since(0)[-1].number + 1
    engine.step()
    steps = [record for record in engine.timeline.since(first) if isinstance(record, Step)]
    assert [(step.steps, step.burst, step.decodes) for step in steps] == [(4, "full", 1)] * 4
    assert [step.end_s - step.begin_s for step in steps] == pytest.approx([STEP_S] * 4)
    assert [step.begin_s for step in steps[1:]] == [step.end_s for step in steps[:-1]]


def test_who_predicts_is_told_what_each_step_of_a_burst_took_and_that_contexts_grew(worlds: Worlds) -> None:
    engine, _, _ = reading(worlds, request("a", max_tokens=9), request("b", max_tokens=9))
    engine.step()
    learner = engine._loop._costs  # type: ignore[attr-defined]
    assert isinstance(learner, Learner)
    assert learner.decodes == [(2, 8 + 2 * step, UNITS, 0, pytest.approx(STEP_S)) for step in range(4)]


def test_what_a_burst_computes_after_a_stop_is_thrown_away_and_nobody_else_notices(worlds: Worlds) -> None:
    stops, goes_on = stopping("stops", 2), request("goes on", max_tokens=9)
    engine, log, device = reading(worlds, stops, goes_on)
    engine.step()
    assert device.bursts == [4]
    assert_right(log, engine, stops)
    assert log.finish("stops") is FinishReason.STOP
    assert engine.counters.wasted_tokens == 2
    assert engine.counters.generated_tokens == 3 + 5
    drain(engine)
    assert_right(log, engine, goes_on)


def test_the_pages_of_who_ends_amid_a_burst_are_free_when_the_device_writes_no_more(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, stopping("stops", 1), request("goes on", max_tokens=9))
    seen: list[tuple[FinishReason | None, int]] = []
    device.meanwhile = lambda step: seen.append((log.finish("stops"), engine.load().free_pages))
    engine.step()
    at_once = 64 - 2 * 2  # of each seven tokens
    assert seen == [(None, at_once)] + [(FinishReason.STOP, at_once)] * 3
    assert engine.load().free_pages == 64 - 2


def test_tokens_that_were_thrown_away_never_become_a_cached_prefix(worlds: Worlds) -> None:
    """The device has filled two pages, and the second one ends with such a token."""
    stops = stopping("stops", 1, prompt=range(5))
    engine, log, device = reading(worlds, stops)
    engine.step()
    assert device.bursts == [4]
    known = [*stops.prompt, *log.tokens("stops")]
    while len(known) < 5 + 1 + MOST:
        known.append(fake_token(stops.params.seed, known, VOCAB))
    engine.submit(same := request("same", known, seed=5))
    drain(engine)
    assert log.events["same"][0].cached_tokens == PAGE
    assert_right(log, engine, same)


def test_an_abort_amid_a_burst_is_answered_after_the_step_under_way(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, request("goes", max_tokens=9), stays := request("stays", max_tokens=9))
    seen: list[tuple[int, FinishReason | None]] = []

    def abort(step: int) -> None:
        if step == 2:
            engine.abort(["goes"])
        seen.append((len(log.tokens("goes")), log.finish("goes")))

    device.meanwhile = abort
    engine.step()
    assert seen == [(1, None), (2, None), (3, FinishReason.ABORT), (3, FinishReason.ABORT)]
    assert log.events["goes"][-1].token is None
    drain(engine)
    assert_right(log, engine, stays)


def test_a_burst_of_which_everybody_is_gone_is_waited_for_and_leaves_nothing_behind(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, request("goes", max_tokens=30))
    device.meanwhile = lambda step: engine.abort(["goes"])
    engine.step()
    assert device.begun == 4
    assert log.finish("goes") is FinishReason.ABORT
    assert engine.load().free_pages == 64
    assert not engine.step()


def test_a_deadline_that_passes_amid_a_burst_ends_its_request_then(worlds: Worlds) -> None:
    late = replace(request("late", max_tokens=9), deadline_s=5.0)
    engine, log, device = reading(worlds, late, stays := request("stays", max_tokens=9))
    ends: list[str | None] = []

    def hang(step: int) -> None:
        ends.append(log.error("late")[0])
        if step == 2:
            device._clock.sleep(6.0)

    device.meanwhile = hang
    engine.step()
    assert ends == [None, None, "DeadlineError", "DeadlineError"]
    assert len(log.tokens("late")) == 3
    drain(engine)
    assert_right(log, engine, stays)


def test_who_comes_amid_a_burst_starts_after_it_and_decodes_as_soon_as_it_can(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, reader := request("reader", max_tokens=40))
    comes = request("comes", [2] * 20, max_tokens=2)
    device.meanwhile = lambda step: engine.submit(comes) if step == 2 else None
    engine.step()
    assert (engine.load().waiting, device.bursts) == (1, [4])
    while not log.tokens("comes"):
        engine.step()
    assert set(device.bursts[1:]) == {1}
    drain(engine)
    assert_right(log, engine, reader, comes)


def test_a_device_that_breaks_amid_a_burst_ends_its_requests_after_what_they_were_given(worlds: Worlds) -> None:
    requests = [request(name, max_tokens=9) for name in ("a", "b")]
    engine, log, _ = reading(worlds, *requests, kind=Breaks)
    engine.step()
    for new in requests:
        assert log.tokens(new.request_id) == expected(new, AUTO)[0][:3]
        assert log.error(new.request_id)[0] == "PdmuxError"
    assert engine.load().free_pages == 64
    engine.submit(after := request("after"))
    drain(engine)
    assert_right(log, engine, after)


def test_who_uses_the_id_of_one_that_ended_in_a_burst_does_not_share_the_bursts_fate(worlds: Worlds) -> None:
    engine, log, device = reading(worlds, stopping("twice", 1), request("other", max_tokens=9), kind=Breaks)
    second = request("twice", [5] * 6)

    def again(step: int) -> None:
        if step == 2:
            log.events.pop("twice")
            engine.submit(second)

    device.meanwhile = again
    engine.step()
    assert log.finish("other") is FinishReason.ERROR
    drain(engine)
    assert_right(log, engine, second)


@pytest.mark.parametrize(
    "wrong",
    [
        StepPlan(StepReason.DECODE_ONLY, ("a",), steps=20),
        StepPlan(StepReason.DECODE_ONLY, ("a", "counted"), steps=2),
        StepPlan(StepReason.CHUNK_MIXED, ("a",), (Chunk("new", 0, 2),), steps=2),
    ],
    ids=["it goes beyond an end", "the host samples", "somebody is prefilled"],
)
def test_a_plan_that_cannot_be_a_burst_is_a_breach(worlds: Worlds, wrong: StepPlan) -> None:
    both_prompts = StepPlan(StepReason.CHUNK_ONLY, prefill=(Chunk("a", 0, 3), Chunk("counted", 0, 3)))
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=Watched, planner=Script(both_prompts, wrong))
    engine.submit(request("a", max_tokens=20))
    engine.submit(request("counted", max_tokens=20, frequency_penalty=0.5))
    engine.submit(request("new", [1, 2]))
    engine.step()
    with pytest.raises(IntegrityError, match="is no burst"):
        engine.step()


def test_a_burst_may_run_beside_a_block_of_another_units(worlds: Worlds) -> None:
    half = Split(4, 4)
    script = Script(
        both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 3, LAYERS))),
        replace(both("a", lanes=use(Mode.SPLIT, half, begin("b", 30, 1))), steps=3),
        replace(both("a", lanes=use(Mode.SPLIT, half)), steps=3),
    )
    engine, log = worlds(limits(mode=Mode.AUTO), runner=Watched, planner=script, costs=(learner := Learner()))
    engine.submit(request("a", max_tokens=20))
    engine.submit(request("b", [2] * 30))
    for _ in range(3):
        engine.step()
    assert log.tokens("a") == expected(request("a", max_tokens=20), engine.limits)[0][:7]
    assert [job.layers_done for job in lanes_of(engine).jobs] == [1]
    beside = [told[3] for told in learner.decodes]
    assert beside == [4, 4, 4, 4, 0, 0], "the block took three steps and most of a fourth"
    engine.close()
