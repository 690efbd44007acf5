"""AUTO."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pdmux_ray.policy.decisions import ModeReason, StepPlan, StepReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.mode_choice import LITTLE, Need, choose_in_time, choose_way, work_rate
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
    assert (plan.lanes.mode, plan.lanes.why) == (Mode.SPLIT, ModeReason.SOONEST)
    assert plan.lanes.split == Split(5, 3)


def test_on_a_few_cores_a_loose_objective_asks_for_a_long_chunk() -> None:
    alone = CPU.decode(4, 400, 2, 0)
    plan = plan_of(busy(2), 3 * alone.bound_s, CPU)
    assert (plan.lanes, plan.why, plan.reason) == (None, ModeReason.SOONEST, StepReason.CHUNK_MIXED)
    assert plan.step_s is not None
    assert 0.6 * 3 * alone.bound_s < plan.step_s.bound_s <= 3 * alone.bound_s


def test_the_objective_decides_on_the_same_device() -> None:
    """A prefill has 5/8 of the device in a split; else what decode leaves of the objective: 1/4, 1/2 and 5/6."""
    alone = GPU.decode(4, 400, 8, 0)
    modes = [mode_of(plan_of(busy(8), factor * alone.bound_s, GPU)) for factor in (1.3, 2.0, 6.0)]
    assert modes[:2] == [Mode.SPLIT, Mode.SPLIT]
    assert modes[2] in (Mode.TIME_SHARED, Mode.CHUNKED)


def test_a_job_that_rests_cannot_become_chunks() -> None:
    view = with_jobs(busy(2), begun(1, waiter("p", 500), done=3))
    assert mode_of(plan_of(view, 0.066, CPU)) in (Mode.TIME_SHARED, Mode.SPLIT, Mode.CAPPED)


def test_with_a_single_unit_there_is_nothing_to_split() -> None:
    view = with_jobs(busy(1), begun(1, waiter("p", 500), done=3))
    assert mode_of(plan_of(view, 0.2, replace(CPU, units=1))) is Mode.TIME_SHARED


def test_when_no_mode_keeps_the_objective_one_that_misses_it_by_little_is_taken() -> None:
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


@pytest.mark.parametrize(
    ("ways", "chosen", "why"),
    [
        ([way(SPLIT, 0.02, 2.0), way(CHUNKED, 0.05, 1.0)], CHUNKED, ModeReason.SOONEST),
        ([way(SPLIT, 0.02, 2.0), way(CHUNKED, 0.05, 1.0, bound_s=0.07)], SPLIT, ModeReason.SOONEST),
        ([way(SPLIT, 0.02, 1.04), way(CHUNKED, 0.05, 1.0)], SPLIT, ModeReason.SOONEST),
        ([way(SPLIT, 0.11, 1.0), way(CHUNKED, 0.08, 2.0)], CHUNKED, ModeReason.BEST_EFFORT),
        ([way(SPLIT, 0.09, 1.0), way(CHUNKED, 0.08, 2.0)], SPLIT, ModeReason.BEST_EFFORT),
    ],
    ids=["earlier end", "bound does not hold", "equals: shorter step", "none holds: least miss", "none holds: equal misses"],
)
def test_choice(ways: list[Way], chosen: Mode, why: ModeReason) -> None:
    assert choose_way(ways, Need(0.06, math.inf, 0.01, 0.5), Mode.TIME_SHARED, 0.0, 0.001, 10.0) == (
        next(w for w in ways if w.mode is chosen),
        why,
    )


@pytest.mark.parametrize(("age_s", "chosen", "why"), [(0.019, SPLIT, ModeReason.DWELL), (0.021, CHUNKED, ModeReason.SOONEST)])
def test_a_mode_stays_until_a_change_is_worth_what_it_costs(age_s: float, chosen: Mode, why: ModeReason) -> None:
    ways = [way(SPLIT, 0.02, 2.0), way(CHUNKED, 0.05, 1.0)]  # a gain of one half, a cost of 1 ms, ten times: 20 ms
    assert choose_way(ways, Need(0.06, math.inf, 0.01, 0.5), SPLIT, age_s, 0.001, 10.0) == (
        next(w for w in ways if w.mode is chosen),
        why,
    )


def test_a_mode_whose_bound_does_not_hold_is_left_at_once() -> None:
    ways = [way(SPLIT, 0.05, 1.0, bound_s=0.07), way(CHUNKED, 0.05, 2.0)]
    assert choose_way(ways, Need(0.06, math.inf, 0.01, 0.5), SPLIT, 0.0, 0.001, 10.0) == (ways[1], ModeReason.SOONEST)


def test_a_mode_that_ends_the_prefill_first_is_not_left_for_an_equal_one() -> None:
    ways = [way(SPLIT, 0.02, 1.04), way(CHUNKED, 0.05, 1.0)]
    assert choose_way(ways, Need(0.06, math.inf, 0.01, 0.5), CHUNKED, 1e9, 0.001, 10.0) == (ways[1], ModeReason.DWELL)


@pytest.mark.parametrize(
    ("left_s", "hurried_s", "hurry"),
    [(2.1, 1.0, False), (1.9, 1.8, True), (1.7, 1.8, False), (-1.0, 0.5, False)],
    ids=["in time", "else late", "late in both", "late already"],
)
def test_a_hurry(left_s: float, hurried_s: float, hurry: bool) -> None:
    need = Need(0.06, left_s, 0.01, 0.5)
    calm, hurried = way(SPLIT, 0.02, 2.0), way(CHUNKED, 0.07, hurried_s)
    choice = choose_in_time(lambda one: (calm if one == need else hurried, ModeReason.SOONEST), need)
    assert choice == ((hurried, ModeReason.HURRY, LITTLE * 0.06) if hurry else (calm, ModeReason.SOONEST, 0.06))


def test_a_deadline_that_has_passed_asks_for_no_second_look() -> None:
    looked: list[Need] = []

    def best(need: Need) -> tuple[Way, ModeReason]:
        looked.append(need)
        return way(SPLIT, 0.02, 2.0), ModeReason.LATE

    assert choose_in_time(best, Need(0.06, -1.0, 0.01, 0.5)).why is ModeReason.LATE
    assert len(looked) == 1


def test_where_no_bound_holds_there_is_no_hurry() -> None:
    calm, hurried = way(SPLIT, 0.08, 2.0), way(CHUNKED, 0.09, 1.0)
    need = Need(0.06, 1.5, 0.01, 0.5)
    choice = choose_in_time(lambda one: (calm if one == need else hurried, ModeReason.BEST_EFFORT), need)
    assert choice == (calm, ModeReason.BEST_EFFORT, 0.06)


def test_a_first_token_that_would_be_late_may_stretch_the_objective_by_little() -> None:
    itl_s = CPU.decode(4, 400, 1, 1).bound_s / 1.2
    stretched = []
    for left_ms in range(10, 400, 10):
        view = replace(busy(2), waiting=[waiter("w", 64, due_s=100.0 + left_ms / 1000)])
        plan = plan_of(view, itl_s, CPU)
        stretched.append(why_of(plan) is ModeReason.HURRY)
        assert gap_bound_s(plan) <= itl_s * (LITTLE if stretched[-1] else 1)
    assert any(stretched), "a deadline that only a stretched objective can keep"
    assert not stretched[-1], "one that can be kept anyway"


def test_without_a_deadline_nothing_is_stretched() -> None:
    itl_s = CPU.decode(4, 400, 1, 1).bound_s / 1.2
    assert why_of(plan_of(busy(2), itl_s, CPU)) is ModeReason.SOONEST


@pytest.mark.parametrize(
    ("left_s", "chosen", "why"),
    [
        (2.5, SPLIT, ModeReason.SLACK),
        (2.3, CHUNKED, ModeReason.SLACK),
        (1.1, CHUNKED, ModeReason.SOONEST),
        (0.9, SPLIT, ModeReason.LATE),
        (-9.0, SPLIT, ModeReason.LATE),
    ],
    ids=["there is time", "the one with more work done may be late", "both may be", "both will be", "it is"],
)
def test_the_way_that_gets_most_work_done_is_taken_unless_haste_may_help(left_s: float, chosen: Mode, why: ModeReason) -> None:
    ways = [way(SPLIT, 0.02, 2.0), way(CHUNKED, 0.05, 1.0)]
    need = Need(0.06, left_s, decode_s=0.015, prefill_s=0.8)  # 0.75 + 0.4 beside 0.3 + 0.8 of the device
    taken = choose_way(ways, need, chosen, 1e9, 0.001, 10.0)
    assert taken == (next(w for w in ways if w.mode is chosen), why)
    assert work_rate(ways[0], need) > work_rate(ways[1], need)


def test_a_deadline_ahead_lets_both_phases_run_at_once_where_a_loose_objective_would_not() -> None:
    itl_s = 6 * GPU.decode(4, 400, 8, 0).bound_s
    due = replace(busy(8), waiting=[waiter("w", 2048, due_s=100.0 + 60.0)])
    at_once = [mode_of(plan_of(view, itl_s, GPU)) in (Mode.SPLIT, Mode.CAPPED) for view in (busy(8), due)]
    assert at_once == [False, True]


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
    need = Need(0.03, math.inf, 0.01, 0.05, waited_s=0.02)
    turns = Way(Mode.TIME_SHARED, Split(2, 2), 10, Estimate(0.025, 0.03), 0.1, Estimate(0.01, 0.01), Estimate(0.015, 0.02))
    split = Way(Mode.SPLIT, Split(1, 1), 10, Estimate(0.012, 0.02), 0.05, Estimate(0.012, 0.02), Estimate(0.01, 0.02))
    assert choose_way([turns, split], need, Mode.SPLIT, 1.0, 1e-6, 10.0)[0] is turns
    assert choose_way([turns, split], need._replace(waited_s=0.0), Mode.SPLIT, 1.0, 1e-6, 10.0)[0] is split
