"""AUTO."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import ModeReason, StepPlan, StepReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.mode_choice import Need, choose_way, expected_misses
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.policy.sharing import Way
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import Mode, Split

from .lanes import Lanes, begun, check, decoder, waiter, with_jobs

CPU = FakeCosts()
GPU = FakeCosts(units=8, knee=3, token_s=0.0001, request_s=0.0)


def plan_of(view: Lanes, itl_s: float, costs: FakeCosts) -> StepPlan:
    plan = plan_lanes(view, LaneLimits(Mode.AUTO, 64, 2048, itl_s=itl_s), costs)
    check(view, plan)
    return plan


def mode_of(plan: StepPlan) -> Mode:
    return plan.lanes.mode if plan.lanes else Mode.CHUNKED


def why_of(plan: StepPlan) -> ModeReason | None:
    return plan.lanes.why if plan.lanes else plan.why


def gap_bound_s(plan: StepPlan) -> float:
    """Between two tokens of a decode."""
    if plan.lanes is None:
        assert plan.step_s is not None
        return plan.step_s.bound_s
    assert plan.lanes.decode_s is not None
    assert plan.lanes.block_s is not None
    return plan.lanes.decode_s.bound_s + plan.lanes.block_s.bound_s * (plan.lanes.mode is Mode.TIME_SHARED)


def busy(units: int) -> Lanes:
    return Lanes(units=units, decoding=[decoder(f"d{i}") for i in range(4)], waiting=[waiter("w", 2048)], now=100.0)


def test_where_a_few_units_decode_as_fast_as_all_a_tight_objective_asks_for_a_split() -> None:
    alone = GPU.decode(4, 400, 8, 0)
    plan = plan_of(busy(8), 1.3 * alone.bound_s, GPU)
    assert plan.lanes is not None
    assert (plan.lanes.mode, plan.lanes.why) == (Mode.SPLIT, ModeReason.SLACK)
    assert plan.lanes.split == Split(5, 3)


def test_on_a_few_cores_a_loose_objective_asks_for_a_long_chunk() -> None:
    alone = CPU.decode(4, 400, 2, 0)
    plan = plan_of(busy(2), 3 * alone.bound_s, CPU)
    assert (plan.lanes, plan.why, plan.reason) == (None, ModeReason.SLACK, StepReason.CHUNK_MIXED)
    assert plan.step_s is not None
    assert 0.6 * 3 * alone.bound_s < plan.step_s.bound_s <= 3 * alone.bound_s


def test_the_objective_decides_on_the_same_device() -> None:
    """A prefill has 5/8 of the device in a split. With a loose objective decodes need no units of their own."""
    alone = GPU.decode(4, 400, 8, 0)
    modes = [mode_of(plan_of(busy(8), factor * alone.bound_s, GPU)) for factor in (1.3, 2.0, 6.0)]
    assert modes[:2] == [Mode.SPLIT, Mode.SPLIT]
    assert modes[2] is not Mode.SPLIT


def test_a_job_that_rests_cannot_become_chunks() -> None:
    view = with_jobs(busy(2), begun(1, waiter("p", 500), done=3))
    assert mode_of(plan_of(view, 0.066, CPU)) in (Mode.TIME_SHARED, Mode.SPLIT, Mode.CAPPED)


def test_with_a_single_unit_there_is_nothing_to_split() -> None:
    view = with_jobs(busy(1), begun(1, waiter("p", 500), done=3))
    assert mode_of(plan_of(view, 0.2, replace(CPU, units=1))) is Mode.TIME_SHARED


def test_when_no_mode_keeps_the_objective_somebody_is_prefilled_all_the_same() -> None:
    plan = plan_of(busy(2), 0.001, CPU)
    assert (plan.why or (plan.lanes and plan.lanes.why)) is ModeReason.BEST_EFFORT
    assert plan.prefill or (plan.lanes and plan.lanes.block)


def test_a_step_of_one_lane_does_not_count_as_a_change_of_mode() -> None:
    idle = Lanes(decoding=[decoder("d")], mode=Mode.CAPPED)
    assert mode_of(plan_of(idle, 0.066, CPU)) is Mode.CAPPED
    assert mode_of(plan_of(replace(idle, mode=Mode.CHUNKED), 0.066, CPU)) is Mode.CHUNKED
    alone = Lanes(waiting=[waiter("w", 5)], mode=Mode.SPLIT)
    assert mode_of(plan_of(alone, 0.066, CPU)) is Mode.SPLIT


def way(mode: Mode, gap_s: float, finish_s: float, bound_s: float | None = None) -> Way:
    gap = Estimate(gap_s, gap_s if bound_s is None else bound_s)
    return Way(mode, Split(1, 1), 1, gap, finish_s, gap, gap)


SPLIT, CHUNKED = Mode.SPLIT, Mode.CHUNKED
NEED = Need(itl_s=0.06, left_s=math.inf, decode_s=0.01, prefill_s=0.04, decodes=4, prompts=1)


def chosen(ways: list[Way], need: Need = NEED, mode: Mode = Mode.TIME_SHARED, age_s: float = 1e9) -> tuple[Way, ModeReason]:
    return choose_way(ways, need, mode, age_s, switch_s=0.001, dwell=10.0)


def test_of_ways_that_keep_the_objective_the_one_that_loses_less_of_the_device_is_taken() -> None:
    ways = [way(SPLIT, 0.02, 0.2), way(CHUNKED, 0.05, 0.1)]  # 0.06 s and 0.04 s are lost
    assert chosen(ways) == (ways[1], ModeReason.SLACK)


def test_many_steps_that_may_each_break_a_gap_are_not_worth_a_little_time() -> None:
    ways = [way(SPLIT, 0.02, 0.2), way(CHUNKED, 0.05, 0.1, bound_s=0.09)]
    assert chosen(ways) == (ways[0], ModeReason.SLACK)


def test_a_prompt_is_not_cut_for_a_bound_that_misses_by_little() -> None:
    whole, cut = way(CHUNKED, 0.05, 0.05, bound_s=0.063), way(CHUNKED, 0.045, 0.15, bound_s=0.0599)
    assert chosen([cut, whole]) == (whole, ModeReason.RISK)


def test_the_more_decodes_there_are_the_less_is_risked_for_a_first_token() -> None:
    ways = [way(SPLIT, 0.03, 0.4), way(CHUNKED, 0.05, 0.05, bound_s=0.08)]
    need = NEED._replace(left_s=0.3, decode_s=0.03)
    taken = [chosen(ways, need._replace(decodes=decodes)) for decodes in (1, 40)]
    assert taken == [(ways[1], ModeReason.RISK), (ways[0], ModeReason.LATE)]


def test_a_first_token_that_is_late_already_is_not_made_later_for_nothing() -> None:
    ways = [way(SPLIT, 0.03, 0.4), way(SPLIT, 0.03, 0.2)]
    late = NEED._replace(left_s=-1.0, decode_s=0.03)
    assert chosen(ways, late) == (ways[1], ModeReason.LATE)


def test_where_no_bound_holds_the_choice_says_so() -> None:
    ways = [way(SPLIT, 0.05, 0.1, bound_s=0.08), way(CHUNKED, 0.05, 0.1, bound_s=0.07)]
    assert chosen(ways) == (ways[1], ModeReason.BEST_EFFORT)


@pytest.mark.parametrize(("age_s", "stays"), [(0.009, True), (0.011, False)])
def test_a_mode_stays_for_ten_times_what_a_change_costs(age_s: float, stays: bool) -> None:
    ways = [way(SPLIT, 0.02, 0.1), way(CHUNKED, 0.02, 0.0999)]
    taken = chosen(ways, mode=SPLIT, age_s=age_s)
    assert taken == ((ways[0], ModeReason.DWELL) if stays else (ways[1], ModeReason.SLACK))


def test_a_change_that_gains_more_than_it_costs_is_made_at_once() -> None:
    ways = [way(SPLIT, 0.02, 0.2), way(CHUNKED, 0.05, 0.1)]
    assert chosen(ways, mode=SPLIT, age_s=0.0)[0] is ways[1]


@given(st.floats(0.001, 0.2), st.floats(1.0, 3.0), st.floats(0.001, 2.0), st.floats(0.01, 1.0), st.integers(0, 300))
def test_more_risk_or_more_time_never_makes_a_way_cheaper(
    gap_s: float, guard: float, more_s: float, left_s: float, decodes: int
) -> None:
    """Of a gap below the objective, whose chance to be broken grows with its bound."""
    need = NEED._replace(itl_s=0.2, left_s=left_s, decodes=decodes, decode_s=0.0)
    one = way(SPLIT, gap_s, 1.0, bound_s=gap_s * guard)
    wider, longer = one._replace(gap_s=Estimate(gap_s, gap_s * guard * 1.5)), one._replace(finish_s=1.0 + more_s)
    near = 1e-9
    assert expected_misses(longer, need) >= expected_misses(one, need) - near
    calm = need._replace(left_s=math.inf)  # without a deadline, which a wider guess may keep after all
    assert expected_misses(wider, calm) >= expected_misses(one, calm) - near


def test_a_deadline_that_only_a_broken_gap_can_keep_is_weighed_against_it() -> None:
    itl_s = CPU.decode(4, 400, 1, 1).bound_s / 1.2
    reasons = set()
    for left_ms in range(10, 400, 10):
        view = replace(busy(2), waiting=[waiter("w", 64, due_s=100.0 + left_ms / 1000)])
        plan = plan_of(view, itl_s, CPU)
        reasons.add(why_of(plan))
        assert gap_bound_s(plan) <= itl_s or why_of(plan) is ModeReason.RISK
    assert ModeReason.SLACK in reasons


def test_a_gap_that_a_block_has_begun_is_not_made_longer_than_the_objective_by_what_comes_beside_the_next_decode() -> None:
    """A loose objective asks for a long chunk; right after a block of TIME_SHARED, whose time is in the same gap, for less."""
    itl_s = 3 * CPU.decode(4, 400, 2, 0).bound_s
    view = busy(2)
    calm = plan_of(view, itl_s, CPU)
    for request in view.decoding:
        request.token_s = view.now - itl_s / 2
    after = plan_of(view, itl_s, CPU)
    assert gap_bound_s(calm) > itl_s / 2
    assert mode_of(after) is Mode.TIME_SHARED or gap_bound_s(after) <= itl_s / 2


def test_who_waits_longest_of_the_decodes_counts() -> None:
    itl_s = 3 * CPU.decode(4, 400, 2, 0).bound_s
    view = busy(2)
    view.decoding[2].token_s = view.now - itl_s / 2
    first = plan_of(view, itl_s, CPU)
    for request in view.decoding:
        request.token_s = view.now - itl_s / 2
    assert plan_of(view, itl_s, CPU) == first


def test_turns_go_on_when_their_block_has_used_up_the_gap_for_everything_else() -> None:
    need = Need(0.03, math.inf, 0.01, 0.05, decodes=4, prompts=1, waited_s=0.02)
    turns = Way(Mode.TIME_SHARED, Split(2, 2), 10, Estimate(0.025, 0.03), 0.1, Estimate(0.01, 0.01), Estimate(0.015, 0.02))
    split = Way(Mode.SPLIT, Split(1, 1), 10, Estimate(0.012, 0.02), 0.05, Estimate(0.012, 0.02), Estimate(0.01, 0.02))
    assert choose_way([turns, split], need, Mode.SPLIT, 1.0, 1e-6, 10.0)[0] is turns
    assert choose_way([turns, split], need._replace(waited_s=0.0), Mode.SPLIT, 1.0, 1e-6, 10.0)[0] is split
