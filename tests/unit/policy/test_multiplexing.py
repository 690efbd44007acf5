from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import Block, Chunk, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.jobs import MOST_SHARED
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.policy.sglang import PublishedRule
from pdmux_ray.types import Mode, Split

from .lanes import LAYERS, Asked, HitSeen, Lanes, begun, check, decoder, waiter, with_jobs

CPU = FakeCosts()
GPU = FakeCosts(units=8, knee=3, token_s=0.0001, request_s=0.0)  # three units draw all of the memory's bandwidth
ITL_S = 0.066


def limits(mode: Mode = Mode.SPLIT, itl_s: float = ITL_S, max_batch: int = 64, **more: float) -> LaneLimits:
    return replace(LaneLimits(mode, max_batch, 2048, itl_s=itl_s), **more)  # type: ignore[arg-type]


def use_of(view: Lanes, limit: LaneLimits, costs: FakeCosts | None = CPU) -> LaneUse:
    plan = plan_lanes(view, limit, costs)
    check(view, plan)
    assert plan.lanes is not None
    return plan.lanes


def block_of(view: Lanes, limit: LaneLimits, costs: FakeCosts | None = CPU) -> Block:
    block = use_of(view, limit, costs).block
    assert block is not None
    return block


def decoders(count: int) -> list[Asked]:
    return [decoder(f"d{i}", arrival=i) for i in range(count)]


# One lane alone.


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, Mode.CHUNKED, Mode.AUTO])
def test_an_empty_engine_does_nothing(mode: Mode) -> None:
    assert plan_lanes(Lanes(), limits(mode), CPU) == StepPlan(StepReason.IDLE)


def test_without_a_prefill_the_decodes_have_every_unit() -> None:
    plan = plan_lanes(Lanes(decoding=[decoder("a"), decoder("b")]), limits(), CPU)
    use = LaneUse(Mode.SPLIT, Split(0, 2), ModeReason.NO_PREFILL, decode_s=CPU.decode(2, 200, 2, 0))
    assert plan == StepPlan(StepReason.DECODE_ONLY, decode=("a", "b"), lanes=use)


def test_without_a_decode_the_prefill_has_every_unit_in_blocks_that_let_arrivals_in() -> None:
    view = Lanes(waiting=[waiter("w", 2048)])
    use = use_of(view, limits(idle_block_s=0.2))
    assert (use.split, use.why) == (Split(2, 0), ModeReason.NO_DECODE)
    assert use.block_s is not None
    assert 0.1 < use.block_s.predicted_s <= 0.2
    assert use.block == Block(None, (Chunk("w", 0, 2048),), 2)


def test_a_layer_that_is_longer_than_a_block_should_be_runs_all_the_same() -> None:
    assert block_of(Lanes(waiting=[waiter("w", 100_000)]), limits()).end_layer == 1


# Units.


@pytest.mark.parametrize(("itl_s", "decode_units"), [(0.03, 2), (0.045, 1), (0.019, 3)])
def test_decode_has_the_fewest_units_that_keep_the_itl_objective(itl_s: float, decode_units: int) -> None:
    costs = replace(GPU, contention=0.0, weights_s=0.0125)  # one unit takes three times as long as three
    use = use_of(Lanes(units=8, decoding=[decoder("a")], waiting=[waiter("w", 500)]), limits(itl_s=itl_s), costs)
    assert (use.split, use.why) == (Split(8 - decode_units, decode_units), ModeReason.FITS)


def test_when_no_split_keeps_the_objective_the_one_that_misses_it_least_is_taken() -> None:
    use = use_of(Lanes(units=8, decoding=[decoder("a")], waiting=[waiter("w", 500)]), limits(itl_s=0.001), GPU)
    assert use.why is ModeReason.BEST_EFFORT
    assert use.decode_s == min(GPU.decode(1, 100, d, 8 - d) for d in range(1, 8))
    assert use.block is not None


def test_capped_lets_decode_use_every_unit_and_caps_the_prefill_as_little_as_the_objective_allows() -> None:
    view = Lanes(units=8, decoding=[decoder("a")], waiting=[waiter("w", 500)])
    use = use_of(view, limits(Mode.CAPPED, itl_s=0.0192), GPU)
    cap = use.split.prefill_units
    assert use.split.decode_units == 8
    assert 1 <= cap < 7
    assert GPU.decode(1, 100, 8, cap).bound_s <= 0.0192 < GPU.decode(1, 100, 8, cap + 1).bound_s


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.CAPPED])
def test_a_single_unit_cannot_be_split(mode: Mode) -> None:
    view = Lanes(units=1, decoding=[decoder("a")], waiting=[waiter("w", 5)])
    with pytest.raises(ValueError, match="cannot be split: only time_shared"):
        plan_lanes(view, limits(mode), CPU)


# Blocks.


def test_a_block_fills_the_decode_step_by_predicted_time() -> None:
    use = use_of(Lanes(decoding=decoders(4), waiting=[waiter("w", 100)]), limits())
    assert use.decode_s is not None
    assert use.block_s is not None
    assert use.block is not None
    assert 0.85 * use.decode_s.predicted_s < use.block_s.predicted_s <= use.decode_s.predicted_s
    longer = CPU.prefill([(100, 0)], use.block.end_layer + 1, 1, 1, last=False)  # type: ignore[list-item]
    assert longer.predicted_s > use.decode_s.predicted_s / 1.05


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.TIME_SHARED])
@pytest.mark.parametrize(("tokens", "last"), [(2, True), (400, False)])
def test_the_block_with_the_last_layer_is_planned_with_the_output_head(mode: Mode, tokens: int, last: bool) -> None:
    head_s = 0.004
    use = use_of(Lanes(decoding=decoders(4), waiting=[waiter("w", tokens)]), limits(mode), replace(CPU, head_s=head_s))
    assert use.block is not None
    assert use.block_s is not None
    assert (use.block.end_layer == LAYERS) is last
    beside = use.split.decode_units if mode is Mode.SPLIT else 0
    without = CPU.prefill([(tokens, 0)], use.block.end_layer, use.split.prefill_units, beside, last=last)  # type: ignore[list-item]
    assert use.block_s.predicted_s == pytest.approx(without.predicted_s + head_s * last)


def test_alone_the_block_with_the_last_layer_is_planned_with_the_output_head() -> None:
    use = use_of(Lanes(waiting=[waiter("w", 20)]), limits(), replace(CPU, head_s=0.004))
    assert use.block_s is not None
    alone = CPU.prefill([(20, 0)], LAYERS, 2, 0, last=True)  # type: ignore[list-item]
    assert use.block_s.predicted_s == pytest.approx(alone.predicted_s + 0.004)


def test_layers_that_do_not_fill_one_decode_step_fill_several() -> None:
    costs = replace(CPU, contention=0.0, fixed_s=0.0, pair_s=0.0, weights_s=0.015, request_s=0.0, context_s=0.0)
    # A decode step takes 30 ms, a layer of this prompt 18: one would leave 40 % of the step empty, three fill two steps.
    view = Lanes(decoding=[decoder("a")], waiting=[waiter("w", 270)])
    assert block_of(view, limits(), costs).end_layer == 3


def test_the_last_block_ends_at_the_last_layer() -> None:
    view = with_jobs(Lanes(decoding=[decoder("a")]), begun(1, waiter("w", 50), done=LAYERS - 2))
    assert block_of(view, limits()) == Block(1, (), LAYERS)


@pytest.mark.parametrize(("itl_s", "waits"), [(0.1, True), (0.055, False)], ids=["the objective allows it", "it does not"])
def test_the_last_layers_are_not_left_for_another_step_when_the_next_one_can_wait_for_them(itl_s: float, waits: bool) -> None:
    use = use_of(Lanes(decoding=decoders(4), waiting=[waiter("w", 8)]), limits(itl_s=itl_s))
    assert use.decode_s is not None
    assert use.block_s is not None
    assert use.block is not None
    assert (use.block.end_layer == LAYERS) is waits
    assert use.block_s.predicted_s <= use.decode_s.predicted_s + use.wait_s


def test_time_shared_gives_the_block_what_decode_leaves_of_the_objective() -> None:
    use = use_of(Lanes(decoding=decoders(4), waiting=[waiter("w", 500)]), limits(Mode.TIME_SHARED))
    assert (use.split, use.why) == (Split(2, 2), ModeReason.FITS)
    assert use.decode_s is not None
    assert use.block_s is not None
    assert 0.7 * ITL_S < use.decode_s.bound_s + use.block_s.bound_s <= ITL_S


def test_time_shared_says_when_one_layer_is_more_than_the_objective_leaves() -> None:
    use = use_of(Lanes(decoding=decoders(4), waiting=[waiter("w", 500)]), limits(Mode.TIME_SHARED, itl_s=0.02))
    assert use.why is ModeReason.BEST_EFFORT
    assert use.block is not None
    assert use.block.end_layer == 1


def test_a_prefix_hit_shortens_the_prediction_and_so_lengthens_the_block() -> None:
    view = Lanes(decoding=[decoder("a")], waiting=[waiter("w", 512)])
    cold = block_of(view, limits())
    view.hits["w"] = HitSeen(tokens=448)
    warm = block_of(view, limits())
    assert warm.chunks == (Chunk("w", 448, 64),)
    assert warm.end_layer > cold.end_layer


# A block in flight.


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.CAPPED, Mode.AUTO])
def test_while_a_block_is_in_flight_the_decodes_go_on_with_their_units(mode: Mode) -> None:
    lane_mode = Mode.SPLIT if mode is Mode.AUTO else mode
    split = Split(5, 8) if mode is Mode.CAPPED else Split(5, 3)
    view = Lanes(units=8, decoding=decoders(2), waiting=[waiter("w", 5)], split=split, mode=lane_mode)
    with_jobs(view, begun(1, waiter("p", 5000), in_flight=True))
    plan = plan_lanes(view, limits(mode, itl_s=0.001), GPU)
    check(view, plan)
    decode_s = GPU.decode(2, 200, split.decode_units, 5)
    use = LaneUse(lane_mode, split, ModeReason.HELD, decode_s=decode_s)
    assert plan == StepPlan(StepReason.LANES_BOTH, decode=("d0", "d1"), lanes=use)


@given(st.sampled_from([Mode.SPLIT, Mode.CAPPED, Mode.AUTO]), st.floats(0.005, 0.2), st.integers(1, 64), st.booleans())
def test_decodes_wait_for_a_block_only_as_long_as_the_next_gap_keeps_the_objective(
    mode: Mode, itl_s: float, batch: int, held: bool
) -> None:
    view = Lanes(2, decoding=decoders(batch), waiting=[waiter("w", 600)], split=Split(1, 1), mode=Mode.SPLIT)
    if held:
        view = with_jobs(replace(view, waiting=[]), begun(1, waiter("p", 500), done=3, in_flight=True))
    use = plan_lanes(view, limits(mode, itl_s), CPU).lanes
    if use is None or use.decode_s is None:
        return
    assert 0 <= use.wait_s <= use.decode_s.predicted_s / 2
    assert use.wait_s == 0 or use.wait_s + use.decode_s.bound_s <= itl_s


def test_a_rule_never_waits() -> None:
    """It is as it was published."""
    view = Lanes(2, decoding=decoders(4), waiting=[waiter("w", 600)])
    assert use_of(view, limits(rule=FixedRule(Split(1, 1)))).wait_s == 0.0


def test_decodes_wait_for_a_block_that_has_every_unit() -> None:
    view = with_jobs(Lanes(decoding=[decoder("a")], split=Split(2, 0)), begun(1, waiter("p", 500), in_flight=True))
    plan = plan_lanes(view, limits(), CPU)
    check(view, plan)
    assert (plan.reason, plan.decode) == (StepReason.LANES_PREFILL, ())


def test_a_block_in_flight_without_decodes_is_waited_for() -> None:
    view = Lanes(waiting=[waiter("w", 5)], split=Split(1, 1), mode=Mode.SPLIT)
    with_jobs(view, begun(1, waiter("p", 500), in_flight=True))
    plan = plan_lanes(view, limits(), CPU)
    assert plan == StepPlan(StepReason.LANES_PREFILL, lanes=LaneUse(Mode.SPLIT, Split(1, 1), ModeReason.HELD))


# Pages and places.


def test_a_request_without_pages_leaves_the_prefill_lane_to_a_job_that_rests() -> None:
    view = with_jobs(Lanes(free_pages=2, decoding=[decoder("a")]), begun(1, waiter("p", 500)))
    view.waiting = [waiter("w", 100, due_s=0.5)]
    assert block_of(view, limits()).job_id == 1


@pytest.mark.parametrize(
    ("free_pages", "max_batch", "reason"), [(1, 64, StepReason.DECODE_NO_PAGES), (99, 1, StepReason.DECODE_BATCH_FULL)]
)
@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.CHUNKED, Mode.AUTO])
def test_who_cannot_start_leaves_every_unit_to_the_decodes(
    mode: Mode, free_pages: int, max_batch: int, reason: StepReason
) -> None:
    view = Lanes(free_pages=free_pages, decoding=[decoder("a")], waiting=[waiter("w", 100), waiter("v", 1)])
    plan = plan_lanes(view, limits(mode, max_batch=max_batch), CPU)
    assert (plan.reason, plan.decode, plan.prefill) == (reason, ("a",), ())
    assert plan.lanes is None or plan.lanes.block is None


def test_the_newest_that_no_block_writes_for_is_preempted_and_the_rest_of_its_job_begins_anew() -> None:
    view = Lanes(free_pages=0, decoding=[decoder("a", 97, arrival=1)], waiting=[waiter("w", 1)])
    view.decoding[0].held_pages = 6
    with_jobs(view, begun(1, waiter("p", 40, arrival=2), waiter("q", 40, arrival=3), done=7))
    plan = plan_lanes(view, limits(), CPU)
    check(view, plan)
    assert (plan.reason, plan.preempt, plan.decode) == (StepReason.PREEMPT, ("q",), ("a",))
    assert plan.lanes is not None
    assert plan.lanes.block is not None
    assert plan.lanes.block.chunks == (Chunk("p", 0, 40),)


def test_requests_of_a_block_in_flight_are_never_preempted() -> None:
    view = Lanes(free_pages=0, decoding=[decoder("a", 97, arrival=1), decoder("b", 50, arrival=2)])
    view.split, view.mode = Split(1, 1), Mode.SPLIT
    view.decoding[0].held_pages = 6
    with_jobs(view, begun(1, waiter("p", 40, arrival=3), in_flight=True))
    plan = plan_lanes(view, limits(), CPU)
    check(view, plan)
    assert (plan.preempt, plan.decode) == (("b",), ("a",))


# Rules that look at no time.


def test_a_fixed_rule_needs_no_latency_model() -> None:
    view = Lanes(units=8, decoding=decoders(2), waiting=[waiter("w", 500)])
    use = use_of(view, limits(rule=FixedRule(Split(6, 2), 4)), None)
    assert use == LaneUse(Mode.SPLIT, Split(6, 2), ModeReason.CONFIGURED, Block(None, (Chunk("w", 0, 500),), 4))
    assert use_of(view, limits(rule=FixedRule(Split(6, 2))), None).block == Block(None, (Chunk("w", 0, 500),), LAYERS)


def test_with_a_latency_model_a_rule_says_what_to_expect() -> None:
    view = Lanes(decoding=[decoder("a")], waiting=[waiter("w", 500)])
    use = use_of(view, limits(rule=FixedRule(Split(1, 1), 4)))
    assert (use.decode_s, use.block_s) == (CPU.decode(1, 100, 1, 1), CPU.prefill([(500, 0)], 4, 1, 1, last=False))  # type: ignore[list-item]


def test_a_rule_decides_the_same_with_a_latency_model_as_without() -> None:
    resting = begun(1, waiter("long", 9000, due_s=9.0))
    view = with_jobs(Lanes(decoding=[decoder("a")], waiting=[waiter("w", 8, due_s=0.2)]), resting)
    rule = limits(rule=FixedRule(Split(1, 1), 4))
    assert block_of(view, rule, CPU) == block_of(view, rule, None)
    many = Lanes(decoding=[decoder("a")], waiting=[waiter(f"w{i}", 400) for i in range(4)])
    assert block_of(many, rule, CPU) == block_of(many, rule, None)


@pytest.mark.parametrize(("decodes", "split"), [(1, Split(7, 1)), (30, Split(4, 4))])
def test_the_published_rule_takes_units_from_its_table_and_layers_from_its_budget(decodes: int, split: Split) -> None:
    rule = PublishedRule((Split(7, 1), Split(6, 2), Split(4, 4)), thresholds=(1, 10, 20), token_budget=1600)
    view = Lanes(units=8, decoding=decoders(decodes), waiting=[waiter("w", 400)])
    use = use_of(view, limits(rule=rule), None)
    assert (use.split, use.why) == (split, ModeReason.TABLE)
    assert use.block is not None
    assert use.block.end_layer == 4


@pytest.mark.parametrize(
    ("mode", "split"), [(Mode.CAPPED, Split(6, 8)), (Mode.TIME_SHARED, Split(8, 8)), (Mode.SPLIT, Split(6, 2))]
)
def test_a_rule_s_units_are_those_of_the_mode(mode: Mode, split: Split) -> None:
    view = Lanes(units=8, decoding=[decoder("a")], waiting=[waiter("w", 400)])
    assert use_of(view, limits(mode, rule=FixedRule(Split(6, 2))), None).split == split


def test_without_a_latency_model_there_must_be_a_rule() -> None:
    with pytest.raises(ValueError, match="need a rule"):
        plan_lanes(Lanes(), limits(), None)


def test_modes_and_rules_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="batching plans its steps"):
        limits(Mode.PREFILL_FIRST)
    with pytest.raises(ValueError, match="takes no rule"):
        limits(Mode.AUTO, rule=FixedRule(Split(1, 1)))
    with pytest.raises(ValueError, match="takes no rule"):
        limits(Mode.CHUNKED, rule=FixedRule(Split(1, 1)))


# CHUNKED.


def test_a_chunk_is_as_long_as_the_objective_allows() -> None:
    view = Lanes(decoding=decoders(4), waiting=[waiter("w", 3000)])
    plan = plan_lanes(view, limits(Mode.CHUNKED), CPU)
    check(view, plan)
    assert (plan.reason, plan.lanes, plan.why) == (StepReason.CHUNK_MIXED, None, ModeReason.CONFIGURED)
    assert plan.step_s is not None
    assert 0.7 * ITL_S < plan.step_s.bound_s <= ITL_S
    looser = plan_lanes(view, limits(Mode.CHUNKED, itl_s=2 * ITL_S), CPU)
    assert looser.prefill[0].tokens > 1.8 * plan.prefill[0].tokens


def test_a_job_is_shared_by_a_bounded_number_of_prompts_however_short() -> None:
    view = Lanes(waiting=[waiter(f"w{number}", 2, arrival=number) for number in range(40)])
    assert len(block_of(view, limits(share_s=10.0)).chunks) == MOST_SHARED


def test_several_short_prompts_share_a_chunk_the_most_urgent_first() -> None:
    view = Lanes(decoding=[decoder("a")], waiting=[waiter("u", 10, due_s=3.0), waiter("v", 10, due_s=2.0, arrival=101)])
    assert plan_lanes(view, limits(Mode.CHUNKED), CPU).prefill == (Chunk("v", 0, 10), Chunk("u", 0, 10))


def test_a_prompt_that_looks_far_back_does_not_join_a_chunk_that_it_would_make_too_long() -> None:
    costs = replace(CPU, pair_s=1e-5)
    view = Lanes(decoding=[decoder("a")], waiting=[waiter("u", 16), waiter("v", 8016, arrival=101)])
    view.hits["v"] = HitSeen(tokens=8000)
    assert plan_lanes(view, limits(Mode.CHUNKED), costs).prefill == (Chunk("u", 0, 16),)


def test_a_chunk_without_decodes() -> None:
    plan = plan_lanes(Lanes(waiting=[waiter("w", 9)]), limits(Mode.CHUNKED), CPU)
    assert (plan.reason, plan.prefill) == (StepReason.CHUNK_ONLY, (Chunk("w", 0, 9),))


def test_a_prompt_that_chunks_have_begun_ends_as_a_job() -> None:
    half = Asked("p", 100, 5, computed_tokens=48, held_pages=7, ttft_deadline_s=math.inf)
    view = Lanes(decoding=[decoder("a")], prefilling=[half])
    assert block_of(view, limits()).chunks == (Chunk("p", 48, 52),)
