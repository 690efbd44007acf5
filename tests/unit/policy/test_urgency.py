"""Whose prompt is next, and who may overtake."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pdmux_ray.policy.decisions import Block
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.types import Mode, Split

from .lanes import LAYERS, Begun, Lanes, begun, check, decoder, waiter, with_jobs

# A prompt token takes 1 ms whatever is beside it and before it: prompts are as long as they take milliseconds.
PLAIN = FakeCosts(fixed_s=0.0, weights_s=1e-6, pair_s=0.0, contention=0.0)
LIMITS = LaneLimits(Mode.SPLIT, 64, 2048, itl_s=1.0, share_s=0.0, patience_s=10.0, overtakes=3)


def next_block(view: Lanes, limits: LaneLimits = LIMITS, costs: FakeCosts = PLAIN) -> Block:
    """Of an engine in which nobody decodes."""
    plan = plan_lanes(view, limits, costs)
    check(view, plan)
    assert plan.lanes is not None
    assert plan.lanes.block is not None
    return plan.lanes.block


def next_prompts(view: Lanes, limits: LaneLimits = LIMITS) -> list[str]:
    return [chunk.request_id for chunk in next_block(view, limits).chunks]


def long_job(due_s: float, overtaken: int = 0, job_id: int = 1) -> Begun:
    return begun(job_id, waiter(f"long{job_id}", 9000, due_s, arrival=job_id), overtaken=overtaken)


def test_without_deadlines_whoever_came_first_is_first() -> None:
    assert next_prompts(Lanes(waiting=[waiter("b", 10, arrival=2), waiter("a", 900, arrival=1)])) == ["a"]


def test_the_earliest_deadline_is_first() -> None:
    assert next_prompts(Lanes(waiting=[waiter("a", 10, 3.0, arrival=1), waiter("b", 10, 2.0, arrival=2)])) == ["b"]


def test_who_has_lost_its_pages_while_somebody_read_it_goes_before_those_that_have_deadlines() -> None:
    assert next_prompts(Lanes(waiting=[waiter("a", 10, 1.0, arrival=1), waiter("preempted", 10, arrival=2)])) == ["preempted"]


@pytest.mark.parametrize("lost", [waiter("lost", 10, due_s=-0.1), waiter("lost", 2000, due_s=1.5)])
def test_who_will_miss_its_deadline_whatever_happens_lets_those_pass_who_need_not(lost: object) -> None:
    assert next_prompts(Lanes(waiting=[lost, waiter("a", 1000, 2.0)])) == ["a"]  # type: ignore[list-item]


def test_but_not_those_who_are_due_much_later() -> None:
    assert next_prompts(Lanes(waiting=[waiter("lost", 10, due_s=-0.1), waiter("a", 1000, 11.0)])) == ["lost"]


def test_a_short_prompt_overtakes_a_long_one_that_has_begun() -> None:
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s=1.0)]), long_job(due_s=20.0))
    assert next_prompts(view) == ["short"]


@pytest.mark.parametrize(
    ("due_s", "why"),
    [(9.2, "it is in time anyway"), (0.05, "it is late anyway"), (float("inf"), "it has no deadline")],
)
def test_it_does_not_when_that_does_not_save_it(due_s: float, why: str) -> None:
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s)]), long_job(due_s=20.0))
    assert next_block(view).job_id == 1, why


@pytest.mark.parametrize(("due_s", "overtaken"), [(9.05, False), (9.2, True), (8.9, True)])
def test_it_does_not_when_the_long_one_would_be_late_for_it_unless_that_is_late_already(due_s: float, overtaken: bool) -> None:
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s=1.0)]), long_job(due_s))
    assert (next_block(view).job_id is None) is overtaken


@pytest.mark.parametrize(("times", "again"), [(2, True), (3, False)])
def test_nobody_is_overtaken_more_often_than_allowed(times: int, again: bool) -> None:
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s=1.0)]), long_job(due_s=20.0, overtaken=times))
    assert (next_block(view).job_id is None) is again


@pytest.mark.parametrize(("tokens", "first"), [(2200, True), (2300, False)])
@pytest.mark.parametrize(("due_s", "long_due_s"), [(0.05, 5.0), (math.inf, math.inf)])
def test_of_those_who_have_no_deadline_to_keep_a_much_shorter_one_is_first(
    due_s: float, long_due_s: float, tokens: int, first: bool
) -> None:
    view = with_jobs(Lanes(waiting=[waiter("short", tokens, due_s)]), long_job(long_due_s))
    assert (next_block(view).job_id is None) is first


def test_every_job_that_rests_must_allow_it() -> None:
    jobs = [long_job(30.0, overtaken=3), long_job(20.0, job_id=2)]
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s=1.0)]), *jobs)
    assert next_block(view).job_id == 2


def test_of_jobs_that_rest_the_most_urgent_goes_on() -> None:
    assert next_block(with_jobs(Lanes(), long_job(30.0), long_job(20.0, job_id=2))).job_id == 2
    assert next_block(with_jobs(Lanes(), long_job(15.0), long_job(20.0, job_id=2))).job_id == 1


def test_layers_that_are_done_are_not_waited_for() -> None:
    job = long_job(due_s=20.0)
    job.layers_done = LAYERS - 3  # 0.9 s are left
    view = with_jobs(Lanes(waiting=[waiter("short", 100, due_s=1.05)]), job)
    assert next_block(view).job_id == 1
    assert next_prompts(with_jobs(Lanes(waiting=[waiter("short", 100, due_s=0.95)]), job)) == ["short"]


def test_prompts_share_a_job_while_they_fit_the_predicted_time() -> None:
    view = Lanes(waiting=[waiter(name, 100, arrival=arrival) for arrival, name in enumerate("abcd")])
    assert next_prompts(view, replace(LIMITS, share_s=0.31)) == ["a", "b", "c"]
    assert next_prompts(view, replace(LIMITS, share_s=0.31, max_prefill_tokens=200)) == ["a", "b"]
    assert next_prompts(view, replace(LIMITS, share_s=0.31, max_batch=2)) == ["a", "b"]
    view.free_pages = 15
    assert next_prompts(view, replace(LIMITS, share_s=0.31)) == ["a", "b"]


def test_nobody_is_late_for_sharing_its_job() -> None:
    dues = {"a": 0.25, "b": 0.9, "c": 0.9}
    view = Lanes(waiting=[waiter(name, 100, due_s, arrival) for arrival, (name, due_s) in enumerate(dues.items())])
    assert next_prompts(view, replace(LIMITS, share_s=1.0)) == ["a", "b"]


def test_several_that_overtake_share_a_job_so_that_they_count_once() -> None:
    view = with_jobs(Lanes(waiting=[waiter("s", 100, 1.0), waiter("t", 100, 1.1)]), long_job(due_s=20.0))
    assert next_prompts(view, replace(LIMITS, share_s=0.3)) == ["s", "t"]


def test_when_together_they_would_harm_the_long_one_the_first_overtakes_alone() -> None:
    view = with_jobs(Lanes(waiting=[waiter("s", 100, 1.0), waiter("t", 100, 1.1)]), long_job(due_s=9.15))
    assert next_prompts(view, replace(LIMITS, share_s=0.3)) == ["s"]


def test_without_a_latency_model_nobody_is_overtaken() -> None:
    view = with_jobs(Lanes(decoding=[decoder("a")], waiting=[waiter("short", 100, 1.0)]), long_job(due_s=20.0))
    plan = plan_lanes(view, replace(LIMITS, rule=FixedRule(Split(1, 1))), None)
    assert plan.lanes is not None
    assert plan.lanes.block == Block(1, (), LAYERS)
