from __future__ import annotations

from dataclasses import replace

import pytest

from pdmux_ray.policy.admission import TtftObjective, admit
from pdmux_ray.policy.decisions import Admission, AdmitReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Mode

from .lanes import Lanes, begun, decoder, waiter, with_jobs

# A prompt token takes 1 ms on two cores and 2 on one, whatever is beside it and before it.
PLAIN = FakeCosts(fixed_s=0.0, weights_s=1e-6, pair_s=0.0, contention=0.0)
LIMITS = LaneLimits(Mode.SPLIT, 64, 2048, itl_s=1.0)
ONE_S = TtftObjective(1.0)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-4)


def ask(view: Lanes, tokens: int, objective: TtftObjective = ONE_S, hit: int = 0) -> Admission:
    return admit(view, Piece(tokens, hit), LIMITS, PLAIN, objective)


def test_an_idle_instance_takes_in_what_is_in_time() -> None:
    assert ask(Lanes(), 500) == Admission(True, near(0.5), 0.0, AdmitReason.IN_TIME)


def test_those_who_are_due_before_it_count() -> None:
    view = Lanes(waiting=[waiter("a", 300, due_s=0.9), waiter("b", 300, due_s=5.0)])
    assert ask(view, 500) == Admission(True, near(0.8), 0.0, AdmitReason.IN_TIME)


def test_who_would_be_late_is_refused_and_told_when_it_would_not() -> None:
    view = Lanes(waiting=[waiter("a", 700, due_s=0.9)])
    assert ask(view, 500) == Admission(False, near(1.2), near(0.2), AdmitReason.LATE)


def test_decodes_slow_the_prefills_down() -> None:
    assert ask(Lanes(decoding=[decoder("d")]), 500).predicted_ttft_s == near(1.0)


def test_a_prompt_that_is_too_long_for_the_objective_is_taken_in_because_to_come_again_would_not_help() -> None:
    assert ask(Lanes(waiting=[waiter("a", 700)]), 1500).reason is AdmitReason.LONG


def test_a_prefix_hit_shortens_the_prediction() -> None:
    assert ask(Lanes(), 100, hit=4000).predicted_ttft_s == near(0.1)


def test_an_objective_may_grow_with_the_prompt() -> None:
    view = Lanes(waiting=[waiter("a", 700, due_s=0.9)])
    assert ask(view, 500, replace(ONE_S, ttft_s_per_token=0.001)).accept


@pytest.mark.parametrize(("due_s", "predicted_s"), [(20.0, 0.1), (9.05, 9.1)])
def test_a_job_that_it_may_overtake_does_not_count(due_s: float, predicted_s: float) -> None:
    view = with_jobs(Lanes(), begun(1, waiter("long", 9000, due_s)))
    assert ask(view, 100).predicted_ttft_s == near(predicted_s)
