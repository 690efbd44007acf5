"""How likely a time is over a limit."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.chances import chance_over
from pdmux_ray.policy.views import Estimate

positive = st.floats(1e-4, 10.0)


@given(positive, st.floats(1.01, 5.0))
def test_half_of_the_times_are_over_the_prediction_and_one_of_a_hundred_over_the_bound(
    predicted_s: float, guard: float
) -> None:
    estimate = Estimate(predicted_s, predicted_s * guard)
    assert chance_over(estimate, estimate.predicted_s) == pytest.approx(0.5)
    assert chance_over(estimate, estimate.bound_s) == pytest.approx(0.01, rel=0.01)


@given(positive, st.floats(1.0, 5.0), positive, positive)
def test_more_room_is_never_a_greater_chance(predicted_s: float, guard: float, one_s: float, other_s: float) -> None:
    estimate = Estimate(predicted_s, predicted_s * guard)
    tight, loose = sorted((one_s, other_s))
    assert 0 <= chance_over(estimate, loose) <= chance_over(estimate, tight) <= 1


@pytest.mark.parametrize(("limit_s", "chance"), [(0.0, 1.0), (-1.0, 1.0), (math.inf, 0.0), (0.9, 1.0), (1.1, 0.0)])
def test_a_bound_at_the_prediction_leaves_no_doubt(limit_s: float, chance: float) -> None:
    assert chance_over(Estimate(1.0, 1.0), limit_s) == pytest.approx(chance)


def test_it_is_the_share_of_times_that_are_over_it() -> None:
    rng = random.Random(1)
    times = [0.02 * rng.lognormvariate(0.0, 0.2) for _ in range(20_000)]
    estimate = Estimate(0.02, sorted(times)[int(0.99 * len(times))])
    assert chance_over(estimate, 0.025) == pytest.approx(sum(time > 0.025 for time in times) / len(times), abs=0.01)
