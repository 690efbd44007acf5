from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from pdmux_ray.latency.correction import DRIFT_AFTER, LEAST_GUARD, CorrectedCosts
from pdmux_ray.latency.loading import as_told
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.profile import Profile
from pdmux_ray.policy.views import LearningCostModel, Piece

from .lawful import Law


@pytest.fixture
def corrected(profile: Profile) -> CorrectedCosts:
    return CorrectedCosts(profile.costs())


def decode(costs: CorrectedCosts, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        costs.observe_decode(4, 800, 1, 1, seconds)


def test_it_is_a_cost_model_that_learns(corrected: CorrectedCosts, profile: Profile) -> None:
    assert isinstance(corrected, LearningCostModel)
    base = profile.costs()
    assert corrected.decode(4, 800, 1, 1) == base.decode(4, 800, 1, 1)
    assert corrected.prefill([Piece(9, 0)], 2, 1, 1, last=True) == base.prefill([Piece(9, 0)], 2, 1, 1, last=True)
    assert corrected.mixed(4, 800, [Piece(9, 0)], 2) == base.mixed(4, 800, [Piece(9, 0)], 2)


def test_steps_that_take_longer_raise_the_prediction_of_their_cell_alone(corrected: CorrectedCosts, profile: Profile) -> None:
    before, elsewhere = profile.costs().decode(4, 800, 1, 1), profile.costs().decode(4, 800, 2, 0)
    for _ in range(200):
        decode(corrected, 1.2 * before.predicted_s)
        corrected.observe_decode(4, 800, 2, 0, elsewhere.predicted_s)
    assert corrected.decode(4, 800, 1, 1).predicted_s == pytest.approx(1.2 * before.predicted_s, rel=0.01)
    assert corrected.decode(4, 800, 2, 0).predicted_s == pytest.approx(elsewhere.predicted_s, rel=0.01)


def test_what_was_never_measured_begins_with_what_everything_else_has_taught(
    corrected: CorrectedCosts, profile: Profile
) -> None:
    decode(corrected, 1.2 * profile.costs().decode(4, 800, 1, 1).predicted_s, times=200)
    fresh, base = corrected.mixed(4, 800, (Piece(16, 0),), 2), profile.costs().mixed(4, 800, (Piece(16, 0),), 2)
    assert fresh.predicted_s == pytest.approx(1.2 * base.predicted_s, rel=0.01)


def test_what_is_not_measured_for_long_is_forgotten(corrected: CorrectedCosts, profile: Profile) -> None:
    """A way that was slow for a moment is not chosen again, so nothing would tell that it is not slow any more."""
    costs = profile.costs()
    slow, other = costs.decode(4, 800, 1, 1), costs.decode(4, 800, 2, 0)
    for _ in range(50):
        corrected.observe_decode(4, 800, 2, 0, other.predicted_s)
        decode(corrected, 2.0 * slow.predicted_s)
    then = corrected.decode(4, 800, 1, 1)
    for _ in range(3000):
        corrected.observe_decode(4, 800, 2, 0, other.predicted_s)
    now = corrected.decode(4, 800, 1, 1)
    assert then.predicted_s > 1.8 * slow.predicted_s
    assert now.predicted_s == pytest.approx(slow.predicted_s, rel=0.05)
    assert now.bound_s <= 1.1 * slow.bound_s


def test_a_mean_that_is_far_off_is_near_after_ten_times(corrected: CorrectedCosts, profile: Profile) -> None:
    """While it nears the truth by small steps, every time is above the bound, and widens it for long."""
    usual_s = profile.costs().decode(4, 800, 1, 1).predicted_s
    decode(corrected, 1.5 * usual_s, times=10)
    assert corrected.decode(4, 800, 1, 1).predicted_s == pytest.approx(1.5 * usual_s, rel=0.15)


def test_a_cell_that_was_never_seen_begins_where_its_neighbours_are(corrected: CorrectedCosts, profile: Profile) -> None:
    decode(corrected, 1.2 * profile.costs().decode(4, 800, 1, 1).predicted_s, times=200)
    small, large = (profile.costs().decode(batch, 9000, 1, 1).predicted_s for batch in (1, 400))
    assert corrected.decode(400, 9000, 1, 1).predicted_s == pytest.approx(1.2 * large, rel=0.02)
    assert large > 4 * small


def test_one_wild_time_moves_the_prediction_little(corrected: CorrectedCosts, profile: Profile) -> None:
    usual_s = profile.costs().decode(4, 800, 1, 1).predicted_s
    decode(corrected, usual_s, times=100)
    decode(corrected, 1000 * usual_s)
    assert corrected.decode(4, 800, 1, 1).predicted_s < 1.1 * usual_s


def test_a_prediction_is_near_the_median_of_what_is_measured_not_drawn_off_by_stalls(
    corrected: CorrectedCosts, profile: Profile
) -> None:
    usual_s = profile.costs().decode(4, 800, 1, 1).predicted_s
    rng = random.Random(3)
    for _ in range(500):
        decode(corrected, usual_s * (2.0 if rng.random() < 0.1 else 1.0))
    assert corrected.decode(4, 800, 1, 1).predicted_s < 1.02 * usual_s


def test_a_time_above_the_bound_widens_it_at_once_and_99_below_undo_that(corrected: CorrectedCosts, profile: Profile) -> None:
    usual = profile.costs().decode(4, 800, 1, 1)

    def guard() -> float:
        estimate = corrected.decode(4, 800, 1, 1)
        return estimate.bound_s / estimate.predicted_s

    decode(corrected, usual.predicted_s, times=100)
    before = guard()
    decode(corrected, 1.5 * usual.bound_s)
    wide = guard()
    decode(corrected, usual.predicted_s, times=98)
    assert wide > 1.1 * before
    assert before < guard() < wide
    decode(corrected, usual.predicted_s)
    assert guard() == pytest.approx(before)


def test_times_that_vary_less_than_in_the_profile_narrow_the_bound_but_never_onto_the_prediction(profile: Profile) -> None:
    parameters = profile.costs().parameters
    base = FittedCosts(replace(parameters, guards={part: (1.5,) * 5 for part in parameters.guards}))
    usual, corrected = base.decode(4, 800, 1, 1), CorrectedCosts(base)
    decode(corrected, usual.predicted_s, times=3000)
    now = corrected.decode(4, 800, 1, 1)
    assert now.bound_s == pytest.approx(LEAST_GUARD * now.predicted_s)
    assert now.bound_s < usual.bound_s


@pytest.mark.parametrize("spread", [0.03, 0.15, 0.4])
def test_about_one_time_of_a_hundred_is_above_the_bound_whatever_the_spread(
    corrected: CorrectedCosts, law: Law, spread: float
) -> None:
    rng = random.Random(2)
    for _ in range(8000):
        decode(corrected, 1.1 * law.decode_s(4, 800, 1, 1) * rng.lognormvariate(0.0, spread))
    figures = corrected.figures()
    assert figures.observed == 8000
    assert figures.exceeded / figures.observed < 0.015


def test_a_drift_is_told_once_shown_and_over_when_it_is_over(
    corrected: CorrectedCosts, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    usual_s = profile.costs().decode(4, 800, 1, 1).predicted_s
    with caplog.at_level(logging.WARNING):
        decode(corrected, 1.6 * usual_s, times=DRIFT_AFTER - 1)
        assert corrected.figures().drifting == 0
        decode(corrected, 1.6 * usual_s, times=200)
        shown = corrected.figures()
        decode(corrected, usual_s, times=300)
        calm = corrected.figures().drifting
        decode(corrected, 1.6 * usual_s, times=300)
    assert shown.drifting == 1
    assert shown.correction == pytest.approx(1.6, rel=0.02)
    assert calm == 0
    assert [record.getMessage()[:36] for record in caplog.records] == ["latency drift: decode on 1 beside 1 t"[:36]]


def test_a_drift_widens_the_bound_once_and_what_is_measured_then_narrows_it_again(
    corrected: CorrectedCosts, profile: Profile
) -> None:
    """A bound that stayed wider than the times ask for would forbid ways that keep the objective."""
    seconds = 1.6 * profile.costs().decode(4, 800, 1, 1).predicted_s

    def guard() -> float:
        estimate = corrected.decode(4, 800, 1, 1)
        return estimate.bound_s / estimate.predicted_s

    decode(corrected, seconds, times=DRIFT_AFTER - 1)
    before = guard()
    decode(corrected, seconds)
    wide = guard()
    decode(corrected, seconds, times=600)
    assert wide > 1.1 * before
    assert guard() < before


def test_what_is_told_corrects_the_profile_of_who_is_told(corrected: CorrectedCosts, profile: Profile) -> None:
    base, pieces = profile.costs(), [Piece(200, 0)]
    for _ in range(200):
        corrected.observe_decode(4, 800, 2, 0, 1.2 * base.decode(4, 800, 2, 0).predicted_s)
        corrected.observe_decode(4, 800, 1, 1, 3.0 * base.decode(4, 800, 1, 1).predicted_s)
        corrected.observe_mixed(4, 800, pieces, 2, 0.9 * base.mixed(4, 800, pieces, 2).predicted_s)
    told = as_told(base, corrected.figures().exported())
    assert told.decode(4, 800, 2, 0).predicted_s == pytest.approx(1.2 * base.decode(4, 800, 2, 0).predicted_s, rel=0.01)
    assert told.decode(4, 800, 2, 0).bound_s < 1.5 * told.decode(4, 800, 2, 0).predicted_s
    assert told.mixed(4, 800, pieces, 2).predicted_s == pytest.approx(0.9 * base.mixed(4, 800, pieces, 2).predicted_s, rel=0.01)
    assert told.prefill(pieces, 12, 2, 0, last=False) == base.prefill(pieces, 12, 2, 0, last=False)
    assert told.switch_s == base.switch_s


def test_who_is_told_nothing_predicts_by_the_profile(profile: Profile) -> None:
    base = profile.costs()
    assert as_told(base, {"pdmux_correction_factor": 2.0}) is base


def test_its_lessons_are_how_much_longer_each_kind_and_size_takes(corrected: CorrectedCosts, profile: Profile) -> None:
    decode(corrected, 1.2 * profile.costs().decode(4, 800, 1, 1).predicted_s, times=200)
    part, cell = corrected.lessons()
    assert (part[:4], cell[:3]) == (("decode", 1, 1, None), ("decode", 1, 1))
    assert (part.factor, cell.factor) == (pytest.approx(1.2, rel=0.01), pytest.approx(1.2, rel=0.01))
    assert (part.times, cell.times) == (200, 200)
