"""Two lanes: a prompt is computed block by block beside the decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.fake_runner import FakeRunner, linear_costs
from pdmux_ray.engine.lane_loop import POLL_S
from pdmux_ray.engine.timeline import PrefillBlock
from pdmux_ray.errors import IntegrityError, QueueFullError
from pdmux_ray.policy.decisions import Block, Chunk, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import Estimate, Piece
from pdmux_ray.types import Mode, Split

from .lane_world import (
    HALF,
    LAYERS,
    STEP_S,
    TOKEN_S,
    UNITS,
    Script,
    assert_right,
    begin,
    both,
    device,
    fixed,
    lanes_of,
    started,
    use,
)
from .test_schedules import drain
from .world import PAGE, VOCAB, StrictRunner, Worlds, expected, limits, request


def test_decodes_go_on_while_a_prompt_is_computed_beside_them(worlds: Worlds) -> None:
    engine, log, clock = started(worlds)
    began_s, before = clock.now(), len(log.tokens("reader"))
    while not log.tokens("long"):
        engine.step()
    took_s, tokens = clock.now() - began_s, len(log.tokens("reader")) - before
    decode_s = 2 * STEP_S  # on half of the units
    assert tokens == pytest.approx(took_s / decode_s)
    assert took_s <= 2 * (STEP_S + 20 * TOKEN_S) + 5 * decode_s


def test_in_one_pass_the_same_decodes_wait_for_the_whole_prompt(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, log = worlds(limits(mode=Mode.PREFILL_FIRST), runner=device, clock=clock)
    engine.submit(request("reader", max_tokens=40))
    engine.step()
    engine.submit(request("long", [2] * 20, max_tokens=3))
    engine.step()
    assert (len(log.tokens("reader")), len(log.tokens("long"))) == (1, 1)


def test_time_shared_steps_decode_and_then_compute_a_block_on_every_unit(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, log = worlds(fixed(2, Mode.TIME_SHARED), runner=device, clock=clock)
    engine.submit(request("reader", max_tokens=40))
    while not log.tokens("reader"):
        engine.step()
    engine.submit(long := request("long", [2] * 20, max_tokens=3))
    began_s = clock.now()
    engine.step()
    assert clock.now() - began_s == pytest.approx(STEP_S + (STEP_S + 20 * TOKEN_S) / 4)
    drain(engine)
    assert_right(log, engine, request("reader", max_tokens=40), long)


class EventlessRunner(FakeRunner):
    """Its `collect_block` does not wait for what the block has written."""

    def _end_block(self, writes: Sequence[tuple[int, int]]) -> None:
        super()._end_block(())


@pytest.mark.parametrize(("kind", "right"), [(FakeRunner, True), (EventlessRunner, False)])
def test_without_the_event_that_orders_the_lanes_the_tokens_would_be_others(
    worlds: Worlds, kind: type[FakeRunner], right: bool
) -> None:
    engine, log, _ = started(worlds, kind)
    drain(engine)
    assert (log.tokens("long") == expected(request("long", [2] * 20, max_tokens=3), engine.limits)[0]) is right


def test_steps_that_only_prefill_count_as_steps(worlds: Worlds) -> None:
    engine, _ = worlds(fixed(2), runner=device)
    engine.submit(request("r", [1] * 20, max_tokens=1))
    drain(engine)
    assert engine.load().steps == 4
    assert engine.counters.modes_by_reason[ModeReason.NO_DECODE] == 4


def test_the_first_token_is_due_by_the_objective_and_no_later_one_is(worlds: Worlds) -> None:
    objectives = MultiplexConfig(policy="fixed", ttft_s=1.0, ttft_s_per_token=0.1)
    engine, _ = worlds(limits(mode=Mode.SPLIT, multiplex=objectives), clock=VirtualClock(5.0))
    engine.submit(request("r", [1] * 10, max_tokens=3))
    engine._loop._receive(5.0)
    waiting = engine._scheduler.requests["r"]
    assert waiting.ttft_deadline_s == pytest.approx(5.0 + 1.0 + 10 * 0.1)
    engine.step()
    assert waiting.ttft_deadline_s == math.inf


@dataclass
class Learner:
    """Predicts as the device does, and keeps what it is told."""

    costs: FakeCosts = field(default_factory=lambda: linear_costs(STEP_S, TOKEN_S, LAYERS, UNITS))
    decodes: list[tuple[Any, ...]] = field(default_factory=list)
    prefills: list[tuple[Any, ...]] = field(default_factory=list)
    passes: list[tuple[Any, ...]] = field(default_factory=list)
    switch_s: float = 0.0

    def decode(self, *arguments: Any) -> Any:
        return self.costs.decode(*arguments)

    def prefill(self, *arguments: Any, **named: Any) -> Any:
        return self.costs.prefill(*arguments, **named)

    def mixed(self, *arguments: Any) -> Any:
        return self.costs.mixed(*arguments)

    def observe_decode(self, *told: Any) -> None:
        self.decodes.append(told)

    def observe_prefill(self, *told: Any) -> None:
        self.prefills.append(told)

    def observe_mixed(self, *told: Any) -> None:
        self.passes.append(told)


def test_who_predicts_is_told_what_each_step_and_block_took(worlds: Worlds) -> None:
    learner = Learner()
    engine, log = worlds(fixed(4), runner=device, costs=learner)
    engine.submit(request("reader", max_tokens=30))
    while not log.tokens("reader"):
        engine.step()
    engine.submit(request("long", [2] * 20, max_tokens=3))
    while not log.tokens("long"):
        engine.step()
    batch, context, units, prefill_units, seconds = learner.decodes[-1]
    assert (batch, units, prefill_units, seconds) == (1, 4, 4, pytest.approx(2 * STEP_S))
    assert context == 3 + len(log.tokens("reader")) - 1
    pieces, layers, units, decode_units, last, seconds = learner.prefills[-1]
    assert (list(pieces), layers, units, decode_units, last) == ([Piece(20, 0)], 4, 4, 4, True)
    assert seconds == pytest.approx(learner.prefill(pieces, 4, 4, 4, last=last).predicted_s)


def test_who_predicts_is_told_of_a_pass_without_a_prefill_as_of_a_decode(worlds: Worlds) -> None:
    learner = Learner()
    script = Script(
        StepPlan(StepReason.CHUNK_ONLY, prefill=(Chunk("a", 0, 4),), why=ModeReason.SLACK),
        StepPlan(StepReason.DECODE_ONLY, ("a",), why=ModeReason.NO_PREFILL),
    )
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, planner=script, costs=learner)
    engine.submit(request("a", [1] * 4, max_tokens=20))
    engine.step()
    engine.step()
    assert learner.passes == [(0, 0, [Piece(4, 0)], UNITS, pytest.approx(STEP_S + 4 * TOKEN_S))]
    assert learner.decodes == [(1, 5, UNITS, 0, pytest.approx(STEP_S))]
    engine.close()


def test_a_mode_that_waited_for_a_block_began_after_it(worlds: Worlds) -> None:
    clock = VirtualClock()
    whole = Split(UNITS, UNITS)
    script = Script(
        both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 4, LAYERS))),
        both("a", lanes=use(Mode.SPLIT, HALF, begin("b", 40, 1))),
        both("a", lanes=use(Mode.TIME_SHARED, whole)),
        both("a", lanes=use(Mode.TIME_SHARED, whole, Block(2, (), 2))),  # planned anew after the wait
    )
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, clock=clock, planner=script)
    engine.submit(request("a", [1] * 4, max_tokens=20))
    engine.submit(request("b", [2] * 40))
    engine.step()
    launched_s = clock.now()
    engine.step()
    engine.step()
    block_s = (STEP_S + 40 * TOKEN_S) / LAYERS * 2
    assert lanes_of(engine).mode_since_s == pytest.approx(launched_s + block_s)
    engine.close()


def test_the_timeline_has_each_block_with_its_own_end(worlds: Worlds) -> None:
    engine, log, _ = started(worlds)
    while not log.tokens("long"):
        engine.step()
    blocks = [record for record in engine.timeline.since(0) if isinstance(record, PrefillBlock) and record.tokens == 20]
    assert [(block.first_layer, block.end_layer) for block in blocks] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert all(block.end_s - block.begin_s == pytest.approx((STEP_S + 20 * TOKEN_S) / 4 * 2) for block in blocks)


def test_a_decode_waits_for_the_block_in_flight_only_when_it_needs_that_blocks_units(worlds: Worlds) -> None:
    clock = VirtualClock()
    script = Script(
        both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 4, LAYERS))),
        both("a", lanes=use(Mode.SPLIT, HALF, begin("b", 40, 1))),
        both("a", lanes=use(Mode.CAPPED, Split(4, UNITS))),
        both("a", lanes=use(Mode.SPLIT, Split(4, 4))),
        both("a", lanes=use(Mode.SPLIT, Split(2, 6))),  # two of them are the block's
        both("a", lanes=use(Mode.SPLIT, Split(2, 6), Block(2, (), 2))),  # planned anew after the wait
    )
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, clock=clock, planner=script)
    engine.submit(request("a", [1] * 4, max_tokens=20))
    engine.submit(request("b", [2] * 40))
    engine.step()
    took = []
    for _ in range(4):
        began_s = clock.now()
        engine.step()
        took.append(clock.now() - began_s)
    block_s = (STEP_S + 40 * TOKEN_S) / LAYERS * 2
    decodes_s = [STEP_S * 2, STEP_S * UNITS / 6, STEP_S * 2]  # CAPPED: the four units that it shares count half
    assert took[:3] == pytest.approx(decodes_s)
    assert took[3] == pytest.approx(block_s - sum(decodes_s) + STEP_S * UNITS / 6)
    assert script.plans == []
    engine.close()


@pytest.mark.parametrize(
    ("predicted_s", "wait_s", "waited_s", "landed"),
    [(0.025, 0.010, 0.005, True), (0.025, 0.004, 0.0, False), (0.035, 0.010, 0.0, False), (0.021, 0.004, 0.004, False)],
    ids=["it ends soon", "not soon enough", "it is due later", "it is late"],
)
def test_decodes_wait_a_moment_for_a_block_that_is_about_to_end(
    worlds: Worlds, predicted_s: float, wait_s: float, waited_s: float, landed: bool
) -> None:
    """The block takes 25 ms, the decodes beside it 20."""
    clock = VirtualClock()
    beside = replace(use(Mode.SPLIT, HALF, begin("b", 4, 2)), block_s=Estimate(predicted_s, 0.1), wait_s=wait_s)
    script = Script(both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 4, LAYERS))), both("a", lanes=beside))
    engine, log = worlds(limits(mode=Mode.AUTO), runner=device, clock=clock, planner=script)
    engine.submit(request("a", [1] * 4, max_tokens=20))
    engine.submit(request("b", [2] * 4))
    engine.step()
    began_s = clock.now()
    engine.step()
    assert clock.now() - began_s == pytest.approx(0.020 + waited_s, abs=2 * POLL_S)
    assert (lanes_of(engine).in_flight is None) is landed
    assert len(log.tokens("a")) == 2
    engine.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (both("a", lanes=use(Mode.SPLIT, HALF), preempt=("b",)), "a block in flight writes into its pages"),
        (both("a", lanes=use(Mode.SPLIT, HALF, Block(2, (), 2))), "job 2 is in flight"),
        (both("a", lanes=use(Mode.SPLIT, HALF, Block(7, (), 2))), "there is no job 7"),
    ],
)
def test_a_plan_that_does_not_fit_the_block_in_flight_is_a_breach(worlds: Worlds, wrong: StepPlan, why: str) -> None:
    script = Script(
        both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 4, LAYERS))),
        both("a", lanes=use(Mode.SPLIT, HALF, begin("b", 40, 1))),
        wrong,
    )
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, planner=script)
    engine.submit(request("a", [1] * 4, max_tokens=20))
    engine.submit(request("b", [2] * 40))
    engine.step()
    engine.step()
    with pytest.raises(IntegrityError, match=why):
        engine.step()


def test_a_policy_sees_who_was_overtaken_and_since_when_the_mode_is_in_force(worlds: Worlds) -> None:
    clock = VirtualClock(3.0)
    script = Script(
        both(lanes=use(Mode.SPLIT, Split(UNITS, 0), begin("a", 4, 2))),
        both(lanes=use(Mode.CAPPED, Split(UNITS, 0), begin("b", 4, 2))),
        both(lanes=use(Mode.CAPPED, Split(UNITS, 0), Block(2, (), 4))),
        both(lanes=use(Mode.CAPPED, Split(UNITS, 0), Block(1, (), 4))),
    )
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, clock=clock, planner=script)
    engine.submit(request("a", [1] * 4))
    engine.submit(request("b", [2] * 4))
    engine.step()
    changed_s = clock.now()
    for _ in range(3):
        engine.step()
    lanes = lanes_of(engine)
    assert [(job.layers_done, job.overtaken) for job in lanes.jobs] == [(4, 1), (4, 0)]
    assert (lanes.mode, lanes.mode_since_s) == (Mode.CAPPED, changed_s)


def test_a_request_whose_first_token_would_come_too_late_is_refused_with_when_to_come_back(worlds: Worlds) -> None:
    """Those who wait are predicted together."""
    refuse = MultiplexConfig(itl_s=1.0, ttft_s=1.0, admission="refuse")
    engine, log = worlds(limits(mode=Mode.SPLIT, multiplex=refuse), runner=device)
    accepted = [request(f"r{i}", [i] * 40, max_tokens=2) for i in range(2)]
    for new in accepted:
        engine.submit(new)
    with pytest.raises(QueueFullError, match=r"2 requests are waiting.*first token would come in 1\.2 s") as refused:
        engine.submit(request("late", [9] * 40))
    assert refused.value.retry_after_s == pytest.approx((STEP_S + 80 * TOKEN_S) + (STEP_S + 40 * TOKEN_S) - 1.0)
    engine.step()
    with pytest.raises(QueueFullError):
        engine.submit(request("late", [9] * 40))
    engine.submit(short := request("short", [9], max_tokens=2))
    drain(engine)
    engine.submit(again := request("late", [9] * 40, max_tokens=2))
    drain(engine)
    assert_right(log, engine, *accepted, short, again)
    judged = engine.counters.figures()["pdmux_admissions_total"]
    assert judged == {"in_time": 4, "late": 2, "long": 0}
    assert engine.counters.figures()["pdmux_mode_steps_total"]["split"] > 0  # type: ignore[index]


def test_a_step_that_changes_no_queue_costs_admission_no_copy(worlds: Worlds) -> None:
    refuse = MultiplexConfig(itl_s=1.0, ttft_s=1000.0, admission="refuse")
    engine, _ = worlds(limits(mode=Mode.SPLIT, multiplex=refuse, max_batch=2), runner=device)
    for index in range(10):
        engine.submit(request(f"r{index}", [index], max_tokens=60))
    queues = (engine._scheduler.decoding, engine._scheduler.waiting, engine._scheduler.prefilling)
    while len(engine._scheduler.decoding) < 2:
        engine.step()
    engine.step()
    before = [queue.copies for queue in queues]
    for _ in range(40):
        engine.step()
    assert [queue.copies for queue in queues] == before
    assert (len(queues[0]), len(queues[1])) == (2, 8)
    drain(engine)
    assert queues[1].copies < 4 * 10  # per request, not per step: there are 30 of these for each


def test_a_full_pool_hides_nobody_who_waits_from_the_prediction(worlds: Worlds) -> None:
    refuse = MultiplexConfig(itl_s=1.0, ttft_s=0.025, ttft_s_per_token=0.02, admission="refuse")
    engine, log = worlds(limits(mode=Mode.SPLIT, multiplex=refuse), runner=lambda clock: device(clock, pages=4))
    engine.submit(request("a", [3] * 7))
    engine.submit(request("b", [4] * 7))
    while len(log.tokens("b")) < 2:
        engine.step()
    assert engine.load().free_pages == 0  # and both readers need a page for their next token
    engine.submit(request("waits", [5] * 4))
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        engine.submit(request("late", [6] * 4))
    drain(engine)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (both(lanes=use(Mode.SPLIT, HALF)), "does nothing"),
        (both(lanes=use(Mode.SPLIT, HALF, begin("a", 3, 1))), "not computed to its end"),
        (both(lanes=use(Mode.SPLIT, HALF, begin("a", 4, LAYERS + 1))), "0 of 8 layers are done"),
    ],
)
def test_a_plan_that_does_not_fit_the_requests_is_a_breach(worlds: Worlds, wrong: StepPlan, why: str) -> None:
    engine, _ = worlds(limits(mode=Mode.AUTO), runner=device, planner=Script(wrong))
    engine.submit(request("a", [1] * 4))
    with pytest.raises(IntegrityError, match=why):
        engine.step()


def test_what_is_queued_of_a_prompt_shrinks_with_each_of_its_blocks(worlds: Worlds) -> None:
    engine, log, _ = started(worlds)
    found = [engine.load().queued_prefill_tokens]
    while not log.tokens("long"):
        engine.step()
        found.append(engine.load().queued_prefill_tokens)
    assert list(dict.fromkeys(found)) == [20, 15, 10, 5, 0]


def test_on_a_single_unit_auto_takes_turns_or_one_pass(worlds: Worlds) -> None:
    one = limits(mode=Mode.AUTO, multiplex=MultiplexConfig(itl_s=0.2))
    asked = [request("reader", max_tokens=40), request("long", [2] * 20, max_tokens=3), request("late", [3] * 9)]
    engine, log = worlds(one, runner=lambda clock: StrictRunner(64, PAGE, STEP_S, TOKEN_S, clock, vocab_size=VOCAB, units=1))
    for new in asked:
        engine.submit(new)
        for _ in range(3):
            engine.step()
    drain(engine)
    assert_right(log, engine, *asked)
    assert {mode for mode, steps in engine.counters.steps_by_mode.items() if steps} <= {Mode.TIME_SHARED, Mode.CHUNKED}
