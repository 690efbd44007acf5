from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.demand import ALWAYS, CLEAR_S, MOST, Capacity, FleetFigures, demand_of
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import Piece

COSTS = FakeCosts(units=8, layers=4, fixed_s=0.0, weights_s=0.01, request_s=1e-3, context_s=1e-6, token_s=1e-4, pair_s=0.0)
ONE = Capacity(COSTS, layers=4, units=8, max_batch=64, pool_tokens=1_000_000, itl_s=math.inf)
IDLE = FleetFigures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
FULL = replace(  # one device decodes as much as it can, and half as many wait
    IDLE,
    generated_tokens_per_s=64 / COSTS.decode(64, 6400, 8, 0).predicted_s,
    decoding=64.0,
    decode_context_tokens=6400.0,
    running=64.0,
    waiting=32.0,
)
amounts = st.floats(0, 1e5)


def test_an_idle_fleet_wants_nothing() -> None:
    assert (demand_of(IDLE, ONE).prefill, demand_of(IDLE, ONE).decode) == (0.0, 0.0)


def test_prompts_want_the_time_that_their_prefills_take() -> None:
    """Two prompts of 1,000 tokens a second."""
    busy = replace(IDLE, prefill_tokens_per_s=2000.0, finished_per_s=2.0)
    prefill_s = COSTS.prefill((Piece(1000, 0),), 4, 8, 0, last=True).predicted_s
    assert demand_of(busy, ONE).prefill == pytest.approx(2 * prefill_s)


def test_a_queue_of_prompts_wants_to_be_cleared_in_time() -> None:
    busy = replace(IDLE, queued_prefill_tokens=1000 * CLEAR_S, finished_per_s=1.0, prefill_tokens_per_s=1000.0)
    without = replace(busy, queued_prefill_tokens=0.0)
    assert demand_of(busy, ONE).prefill == pytest.approx(2 * demand_of(without, ONE).prefill)


def test_tokens_want_their_share_of_a_full_batch_s_steps() -> None:
    busy = replace(IDLE, generated_tokens_per_s=100.0, decoding=1.0, decode_context_tokens=100.0, running=1.0)
    step_s = COSTS.decode(64, 6400, 8, 0).predicted_s
    assert demand_of(busy, ONE).decode == pytest.approx(100 * step_s / 64)


def test_those_who_do_not_fit_a_batch_want_more_devices_than_there_are() -> None:
    """A fleet that is full generates no more than it can, whatever is asked of it."""
    assert demand_of(FULL, ONE).decode == pytest.approx(1.5)


def test_no_phase_wants_more_than_twice_what_is_done() -> None:
    """A queue that grows for ever says that the load is too much, not for which phase."""
    assert demand_of(replace(FULL, waiting=1e6), ONE).decode == pytest.approx(MOST)
    busy = replace(IDLE, prefill_tokens_per_s=20_000.0, finished_per_s=20.0)
    stuck = replace(busy, queued_prefill_tokens=1e9)
    assert demand_of(stuck, ONE).prefill == pytest.approx(MOST * demand_of(busy, ONE).prefill)


def test_a_phase_of_which_nothing_was_done_lately_may_want_a_device() -> None:
    """Its only instance hung, or a burst has just come."""
    assert demand_of(replace(IDLE, queued_prefill_tokens=1e9), ONE).prefill == ALWAYS
    assert demand_of(replace(IDLE, waiting=1e6, running=1.0, decoding=1.0), ONE).decode == ALWAYS


def test_who_waits_behind_prompts_that_are_long_in_coming_wants_no_decodes() -> None:
    late = replace(FULL, decoding=2.0, decode_context_tokens=200.0, generated_tokens_per_s=25.0, waiting=64.0)
    assert demand_of(late, ONE).decode == pytest.approx(4 / 64)


@pytest.mark.parametrize(
    ("tight", "batch"),
    [
        (replace(ONE, itl_s=COSTS.decode(20, 2000, 8, 0).bound_s), 20),
        (replace(ONE, pool_tokens=1000), 10),
        (replace(ONE, max_batch=5), 5),
        (replace(ONE, itl_s=1e-6), 1),
    ],
    ids=["objective", "pages", "places", "an objective that nothing keeps"],
)
def test_a_batch_is_no_larger_than_what_limits_it(tight: Capacity, batch: int) -> None:
    assert tight.batch(100.0) == batch


@given(amounts, amounts, st.floats(0, 100), amounts, st.floats(0, 500), st.floats(0, 500), st.floats(0, 500))
def test_more_work_never_wants_less(
    prefilled: float, generated: float, finished: float, queued: float, decoding: float, running: float, waiting: float
) -> None:
    figures = FleetFigures(0.0, prefilled, generated, finished, queued, decoding, 100 * decoding, running, waiting)
    demand = demand_of(figures, ONE)
    assert min(demand.prefill, demand.decode) >= 0
    assert demand_of(replace(figures, queued_prefill_tokens=queued + 100), ONE).prefill >= demand.prefill
    assert demand_of(replace(figures, generated_tokens_per_s=generated + 100), ONE).decode >= demand.decode
    assert demand_of(replace(figures, waiting=waiting + 10), ONE).decode >= demand.decode
