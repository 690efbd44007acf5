"""How many decode steps a device is given at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmux_ray.policy.decisions import BurstReason, StepPlan
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.types import Mode, Split

from .lanes import PAGE, Asked, Lanes, begun, check, decoder, waiter, with_jobs

DEVICE = FakeCosts(fixed_s=0.0, weights_s=0.005, request_s=0.0, context_s=0.0)  # any decode step takes 5 ms
LEVEL = replace(DEVICE, knee=1, contention=0.0, pair_s=0.0)  # on any unit, and beside a prefill, too
MOST = 8


def reader(name: str = "a", known: int = 100, left: int = 50, **more: Any) -> Asked:
    request = decoder(name, known)
    request.left = left
    for field, value in more.items():
        setattr(request, field, value)
    return request


def planned(view: Lanes, costs: FakeCosts | None = DEVICE, **more: Any) -> StepPlan:
    limits = LaneLimits(**{"mode": Mode.SPLIT, "max_batch": 8, "max_prefill_tokens": 512, "most_steps": MOST, **more})
    plan = plan_lanes(view, limits, costs)
    check(view, plan)
    return plan


def burst(view: Lanes, costs: FakeCosts | None = DEVICE, **more: Any) -> tuple[int, BurstReason | None]:
    plan = planned(view, costs, **more)
    return plan.steps, plan.burst


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, Mode.CHUNKED, Mode.AUTO])
def test_decodes_that_nothing_disturbs_are_given_as_many_steps_as_the_device_takes(mode: Mode) -> None:
    assert burst(Lanes(decoding=[reader("a"), reader("b")]), mode=mode, itl_s=0.1) == (MOST, BurstReason.FULL)


def test_a_device_that_takes_one_step_at_a_time_leaves_no_choice() -> None:
    assert burst(Lanes(decoding=[reader()]), most_steps=1) == (1, None)


def test_in_turns_with_a_prefill_there_is_no_choice() -> None:
    waits = Lanes(decoding=[reader()], waiting=[waiter("w", 100)])
    assert burst(waits, mode=Mode.TIME_SHARED, itl_s=0.1) == (1, None)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, (1, BurstReason.BLOCK)), (3, (4, BurstReason.BLOCK)), (30, (MOST, BurstReason.FULL))],
)
def test_beside_a_block_that_is_launched_a_burst_ends_before_it_does(layers: int, expected: tuple[int, BurstReason]) -> None:
    """A layer takes 6.8 ms, a step 5."""
    view = Lanes(decoding=[reader()], waiting=[waiter("w", 100)])
    assert burst(view, LEVEL, rule=FixedRule(Split(1, 1), layers)) == expected


@pytest.mark.parametrize(("left_s", "steps"), [(0.0151, 3), (0.004, 1), (-1.0, 1), (None, 1)])
def test_beside_a_block_in_flight_a_burst_ends_before_it_is_due(left_s: float | None, steps: int) -> None:
    job = begun(1, waiter("w", 9), in_flight=True)
    job.ends_s = None if left_s is None else 50.0 + left_s
    view = with_jobs(Lanes(decoding=[reader()], split=Split(1, 1), mode=Mode.SPLIT, now=50.0), job)
    assert burst(view, LEVEL) == (steps, BurstReason.BLOCK)


def test_beside_a_block_whoever_is_fetched_still_waits_for_one_step_at_most() -> None:
    view = Lanes(decoding=[reader()], waiting=[waiter("w", 100)], transferring=[reader("far away")])
    assert burst(view, LEVEL, rule=FixedRule(Split(1, 1))) == (1, BurstReason.JOINS)


@pytest.mark.parametrize(("free_pages", "expected"), [(7, (4, BurstReason.PAGES)), (8, (MOST, BurstReason.FULL))])
def test_a_burst_leaves_the_job_beside_its_pages(free_pages: int, expected: tuple[int, BurstReason]) -> None:
    view = Lanes(decoding=[reader("a", 2 * PAGE - 3)], waiting=[waiter("w", 100)], free_pages=free_pages)
    assert burst(view, LEVEL, rule=FixedRule(Split(1, 1))) == expected


@pytest.mark.parametrize(
    "view",
    [
        Lanes(decoding=[reader()], waiting=[waiter("w", 100)], free_pages=1),
        Lanes(decoding=[reader(known=PAGE + 1, held_pages=1), reader("b", arrival=9)], free_pages=0),
        Lanes(decoding=[reader()], transferring=[reader("far away")]),
    ],
    ids=["it waits for pages", "it is preempted", "its KV is on its way"],
)
def test_somebody_who_is_to_decode_soon_waits_for_one_step_at_most(view: Lanes) -> None:
    assert burst(view) == (1, BurstReason.JOINS)


def test_whoever_waits_for_a_place_in_the_batch_waits_for_one_step_at_most() -> None:
    assert burst(Lanes(decoding=[reader()], waiting=[waiter("w", 9)]), max_batch=1) == (1, BurstReason.JOINS)


def test_a_request_whose_tokens_need_the_host_makes_it_one_step_for_all() -> None:
    assert burst(Lanes(decoding=[reader("a"), reader("b", host_sampled=True)])) == (1, BurstReason.HOST)


def test_no_request_gets_a_step_after_its_last_token() -> None:
    assert burst(Lanes(decoding=[reader("a"), reader("b", left=3)])) == (3, BurstReason.ENDS)
    assert burst(Lanes(decoding=[reader("a"), reader("b", left=1)])) == (1, BurstReason.ENDS)
    assert burst(Lanes(decoding=[reader(left=MOST)])) == (MOST, BurstReason.FULL)


@pytest.mark.parametrize(("left_s", "steps"), [(0.0201, 4), (0.001, 1), (-1.0, 1)])
def test_no_burst_goes_on_beyond_a_deadline(left_s: float, steps: int) -> None:
    view = Lanes(now=50.0, decoding=[reader("a"), reader("b", deadline_s=50.0 + left_s)])
    assert burst(view) == (steps, BurstReason.ENDS)


@pytest.mark.parametrize(("idle_block_s", "steps"), [(0.0151, 3), (0.001, 1)])
def test_whoever_comes_amid_a_burst_is_looked_at_as_soon_as_beside_a_block_of_an_idle_device(
    idle_block_s: float, steps: int
) -> None:
    assert burst(Lanes(decoding=[reader()]), idle_block_s=idle_block_s) == (steps, BurstReason.ARRIVALS)


def test_without_a_latency_model_nobody_can_say_how_long_an_arrival_would_wait() -> None:
    assert burst(Lanes(decoding=[reader()]), None, rule=FixedRule(Split(1, 1))) == (1, BurstReason.NO_MODEL)


@pytest.mark.parametrize(("free_pages", "steps"), [(0, 4), (1, 7), (2, MOST)])
def test_a_burst_takes_nobodys_pages(free_pages: int, steps: int) -> None:
    """Of the one there are four slots left, of the other seven."""
    view = Lanes(decoding=[reader("a", 2 * PAGE - 3), reader("b", 2 * PAGE - 6)], free_pages=free_pages)
    plan = planned(view)
    assert (plan.steps, plan.burst) == (steps, BurstReason.FULL if steps == MOST else BurstReason.PAGES)
    assert plan.preempt == ()
