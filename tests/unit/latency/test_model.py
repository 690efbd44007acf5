from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS, Curve, decode_row, mixed_row, prefill_row, ramps
from pdmux_ray.latency.fit import conformal_quantile
from pdmux_ray.latency.model import SIZES_S, Contention, FittedCosts, LaneModel, Parameters, bandwidth_at, size_of, stretch
from pdmux_ray.policy.views import Estimate, Piece
from tests.examples import tried

LEVELS = (8, 16, 64)
COUNTS = st.integers(0, 400)


def lane(width: int, by: Contention, seed: int) -> LaneModel:
    rng = np.random.default_rng(seed)
    steps = rng.random((len(LEVELS), width)) * 1e-3
    terms = np.cumsum(steps[::-1], axis=0)[::-1]
    return LaneModel(LEVELS, 1e-3, tuple(map(tuple, terms.tolist())), by)


BESIDE = Contention(0.7, 0.1, 0.5, 0.4)


def costs(by: Contention = BESIDE, seed: int = 3) -> FittedCosts:
    guards = {kind: (1.5, 1.4, 1.3, 1.2, 1.1) for kind in ("decode", "prefill", "mixed")}
    bandwidth = ((8, 4e11), (16, 8e11), (64, 1e12))
    mixed = tuple(np.random.default_rng(seed).random(6 + len(TOKEN_KNOTS)) * 1e-4)
    decode, prefill = lane(2 + len(BATCH_KNOTS), by, seed), lane(6 + len(TOKEN_KNOTS), by, seed)
    return FittedCosts(Parameters(10, 64, 0.0, bandwidth, decode, prefill, mixed, guards))


@settings(max_examples=tried(25), deadline=None)
@given(COUNTS, st.lists(st.floats(0, 5), min_size=len(BATCH_KNOTS), max_size=len(BATCH_KNOTS)))
def test_a_curve_is_its_slopes_times_its_segments(count: int, slopes: list[float]) -> None:
    assert Curve(BATCH_KNOTS, slopes)(count) == pytest.approx(float(np.dot(slopes, ramps(count, BATCH_KNOTS))))


@settings(max_examples=tried(25), deadline=None)
@given(st.integers(1, 300), st.integers(1, 10_000), st.sampled_from(LEVELS))
def test_a_decode_is_its_terms_times_its_features(batch: int, context: int, units: int) -> None:
    model = costs()
    decode = model.parameters.decode
    expected_s = decode.fixed_s + float(np.dot(decode.at(units), decode_row(batch, context)))
    assert model.decode(batch, context, units, 0).predicted_s == pytest.approx(expected_s)


@settings(max_examples=tried(25), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 900)), min_size=1, max_size=4), st.sampled_from(LEVELS))
def test_a_whole_prefill_is_its_terms_times_its_features_however_it_is_cut(sizes: list[tuple[int, int]], units: int) -> None:
    model, pieces = costs(), [Piece(*size) for size in sizes]
    prefill = model.parameters.prefill
    whole_s = prefill.fixed_s + float(np.dot(prefill.at(units), prefill_row(pieces, 10, last=True)))
    assert model.prefill(pieces, 10, units, 0, last=True).predicted_s == pytest.approx(whole_s)
    cut_s = sum(model.prefill(pieces, layers, units, 0, layers == 5).predicted_s for layers in (1, 4, 5))
    assert cut_s - 2 * prefill.fixed_s == pytest.approx(whole_s)


@settings(max_examples=tried(25), deadline=None)
@given(st.integers(0, 60), st.integers(0, 9000), st.integers(1, 600), st.integers(0, 900))
def test_a_mixed_step_is_its_terms_times_its_features(batch: int, context: int, new: int, prior: int) -> None:
    model, pieces = costs(), [Piece(new, prior)]
    expected_s = float(np.dot(model.parameters.mixed, mixed_row(batch, context, pieces)))
    assert model.mixed(batch, context, pieces, 64).predicted_s == pytest.approx(expected_s)


@settings(max_examples=tried(12), deadline=None)
@given(st.integers(0, 50), st.integers(1, 64), st.integers(0, 5000), st.sampled_from([0, 3, 8, 20, 40, 64]))
def test_more_units_are_never_slower_alone_or_beside_the_same_lane(seed: int, batch: int, context: int, beside: int) -> None:
    model = costs(seed=seed)
    for units in (range(1, 65 - beside, 3), range(65 - beside, 65, 3)):
        decodes = [model.decode(batch, context, u, beside) for u in units]
        prefills = [model.prefill([Piece(batch, context)], 2, u, beside, last=True) for u in units]
        for times in (decodes, prefills):
            assert rises(times) == []


def rises(times: Sequence[Estimate]) -> list[tuple[float, float]]:
    """Neighbours of which the second is longer."""
    return [(a, b) for (a, _), (b, _) in pairwise(times) if b > a * (1 + 1e-12)]


def test_a_lane_beside_another_has_the_bandwidth_that_is_left() -> None:
    table = ((32, 60e9), (64, 100e9))
    alone = stretch(table, 64, 32, 0, Contention(1.0, 0.2))
    beside = stretch(table, 64, 32, 32, Contention(1.0))
    little = stretch(table, 64, 32, 32, Contention(0.5))
    assert alone == 1
    assert beside == pytest.approx(60 / 40)  # 60 of 100 are drawn
    assert little == 1  # 70 are left, and it draws 60


def test_units_that_both_lanes_use_cost_by_their_part() -> None:
    table = ((64, 100e9),)
    by = Contention(shared=0.5, share=0.8)
    assert stretch(table, 64, 64, 16, by) == pytest.approx(1.5 + 0.8 / 4)
    assert stretch(table, 64, 48, 16, by) == 1


def test_bandwidth_grows_in_proportion_below_the_first_level_and_stays_above_the_last() -> None:
    table = ((8, 80.0), (16, 100.0))
    assert [bandwidth_at(table, units) for units in (4, 8, 12, 16, 60)] == [40.0, 80.0, 90.0, 100.0, 100.0]


def test_a_bound_is_the_prediction_times_the_guard_of_its_size_and_never_lower_for_more_work() -> None:
    model, guards = costs(), (1.5, 1.4, 1.3, 1.2, 1.1)
    before_s = 0.0
    for context in range(10, 800_000, 997):
        predicted_s, bound_s = model.decode(8, context, 8, 0)
        guarded_s = predicted_s * guards[size_of(predicted_s)]
        assert bound_s == pytest.approx(
            max(guarded_s, *(g * s for g, s in zip(guards, SIZES_S, strict=False) if s <= predicted_s), 0)
        )
        assert bound_s >= before_s
        before_s = bound_s


@pytest.mark.parametrize(("units", "beside"), [(0, 0), (65, 0), (8, 65)])
def test_units_that_the_device_does_not_have_are_an_error(units: int, beside: int) -> None:
    with pytest.raises(ValueError, match="the device has 64"):
        costs().decode(1, 1, units, beside)


def test_a_mixed_step_on_some_units_is_an_error() -> None:
    with pytest.raises(ValueError, match="all 64 units"):
        costs().mixed(1, 1, [Piece(1, 0)], 32)


def test_a_conformal_quantile_needs_99_values_and_is_the_rank_above() -> None:
    assert conformal_quantile([1.0] * 98) is None
    assert conformal_quantile([float(i) for i in range(99)]) == 98.0
    assert conformal_quantile([float(i) for i in range(1000)]) == 990.0
