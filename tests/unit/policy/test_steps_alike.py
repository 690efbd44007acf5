"""How many decode steps are certain to be planned alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import StepPlan, StepReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.look_ahead import Alike, steps_alike
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.types import Mode

from .lanes import PAGE, Asked, Lanes, decoder, waiter

MODES = (Mode.AUTO, Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED)


def reader(name: str, known: int = 100, left: int = 50, **more: Any) -> Asked:
    request = decoder(name, known)
    request.left = left
    for field, value in more.items():
        setattr(request, field, value)
    return request


def test_they_last_until_the_step_in_which_somebody_may_end() -> None:
    assert steps_alike(Lanes(decoding=[reader("a", left=50), reader("b", left=7)])) == Alike(6, math.inf)


def test_each_begins_before_the_first_deadline() -> None:
    assert steps_alike(Lanes(decoding=[reader("a", deadline_s=9.0), reader("b", deadline_s=4.0)])).before_s == 4.0


@pytest.mark.parametrize(
    "more",
    [
        {"waiting": [waiter("w", 10)]},
        {"prefilling": [waiter("w", 10)]},
        {"transferring": [waiter("w", 10)]},
        {"decoding": []},
        {"decoding": [reader("a", stops_early=True)]},
        {"decoding": [reader("a", host_sampled=True)]},
    ],
)
def test_there_are_none_when_anybody_else_is_there_or_a_token_may_matter(more: dict[str, Any]) -> None:
    assert steps_alike(Lanes(**{"decoding": [reader("a")], **more})).steps == 0


@given(
    st.lists(st.tuples(st.integers(1, 4 * PAGE), st.integers(1, 60)), min_size=1, max_size=5),
    st.integers(0, 12),
    st.sampled_from(MODES),
)
def test_so_many_steps_are_planned_alike_and_the_one_after_may_not_be(
    lengths: list[tuple[int, int]], free_pages: int, mode: Mode
) -> None:
    """Step by step, as an engine takes them."""
    view = Lanes(decoding=[reader(str(index), known, left) for index, (known, left) in enumerate(lengths)])
    view.free_pages = free_pages
    steps, _ = steps_alike(view)
    limits = LaneLimits(mode=mode, max_batch=8, max_prefill_tokens=512, itl_s=0.1)
    seen = set[StepPlan]()
    for _ in range(steps):
        plan = plan_lanes(view, limits, FakeCosts())
        assert plan.lanes is not None
        seen.add(replace(plan, lanes=replace(plan.lanes, decode_s=None)))
        grow(view)
    assert len(seen) == bool(steps)
    assert all(plan.reason is StepReason.DECODE_ONLY and len(plan.decode) == len(lengths) for plan in seen)
    assert all(request.left >= 1 for request in view.decoding)
    if not any(request.left == 1 for request in view.decoding):
        assert plan_lanes(view, limits, FakeCosts()).preempt


def grow(view: Lanes) -> None:
    for request in view.decoding:
        if request.known_tokens > request.held_pages * PAGE:
            request.held_pages += 1
            view.free_pages -= 1
        request.computed_tokens = request.known_tokens
        request.known_tokens += 1
        request.left -= 1
