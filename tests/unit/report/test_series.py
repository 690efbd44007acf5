from __future__ import annotations

import numpy as np
import pytest

from pdmux_ray.report import series
from pdmux_ray.report.series import UnitsSample, Window

from .samples import failed, lifeline


def test_the_gaps_of_a_chart_are_those_of_the_lifelines() -> None:
    together = lifeline(0.0, 0.1, [0.02, 0.5])
    together.tokens_arrived(together.token_s[-1], 3)  # with the token before: no gap
    requests = [lifeline(5.0, 0.2, [0.03] * 4), together, failed(6.0, "no"), lifeline(7.0, 0.1, [])]
    times, lengths = series.gaps(requests, begin_s=5.0)
    assert lengths.tolist() == [gap for request in requests for gap in request.gaps_s]
    assert times[:4].tolist() == pytest.approx([0.23, 0.26, 0.29, 0.32])


def test_few_values_are_all_in_the_cdf() -> None:
    assert series.cdf(np.array([3.0, 1.0, 2.0, 2.0])) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert series.cdf(np.array([])) == []


def test_a_cdf_of_many_values_is_short_and_right_also_in_the_tail() -> None:
    values = np.random.default_rng(1).exponential(size=10_000)
    points = series.cdf(values, points=200)
    assert len(points) <= 200
    assert points[-1] == (values.max(), 1.0)
    assert all(share == pytest.approx(np.mean(values <= value)) for value, share in points)
    assert sum(share > 0.99 for _, share in points) >= 20


def test_no_stall_is_lost_in_the_bins_of_a_run() -> None:
    requests = [lifeline(index * 0.01, 0.1, [0.02] * 50) for index in range(1000)]
    requests[500] = lifeline(5.0, 0.1, [0.02] * 20 + [1.7] + [0.02] * 29)
    window = Window.of(requests)
    bins = series.gap_bins(*series.gaps(requests, window.begin_s), window.span_s)
    assert 100 < len(bins) <= series.TIME_BINS
    longest = max(bins, key=lambda b: b.max_s)
    assert longest.max_s == pytest.approx(1.7)
    assert longest.time_s == pytest.approx(5.1 + 20 * 0.02 + 1.7, abs=longest.width_s)


def test_a_bin_has_the_quantiles_of_its_gaps() -> None:
    lengths = np.linspace(0.01, 0.02, 100)
    (only,) = series.gap_bins(np.full(100, 0.5), lengths, span_s=1.0, bins=1)
    assert (only.p50_s, only.p99_s, only.max_s) == pytest.approx((0.015, 0.0199, 0.02))


def test_a_short_run_gets_few_bins_for_a_percentile_of_few_gaps_means_little() -> None:
    assert len(series.gap_bins(np.linspace(0, 1, 60), np.full(60, 0.01), span_s=1.0)) == 2
    assert series.gap_bins(np.empty(0), np.empty(0), span_s=1.0) == []


def test_few_arrivals_are_exact_and_many_keep_their_tokens() -> None:
    requests = [lifeline(10.0 + index, 0.1, [0.1], prompt_tokens=index + 1) for index in range(1000)]
    few = requests[:3]
    assert series.arrivals(few, Window.of(few)) == [(0.0, 1), (1.0, 2), (2.0, 3)]
    many = series.arrivals(requests, Window.of(requests))
    assert len(many) <= series.ARRIVAL_MARKS
    assert sum(tokens for _, tokens in many) == 500 * 1001


def test_units_are_those_of_the_run_and_hold_to_its_end() -> None:
    samples = [UnitsSample(12.0, 32, 100), UnitsSample(5.0, 16, 116), UnitsSample(99.0, 1, 1), UnitsSample(11.0, 16, 116)]
    steps = series.units(samples, Window(10.0, 20.0))
    assert steps == [UnitsSample(1.0, 16, 116), UnitsSample(2.0, 32, 100), UnitsSample(10.0, 32, 100)]
    assert series.units(samples, Window(200.0, 300.0)) == []


def test_many_units_samples_become_means() -> None:
    samples = [UnitsSample(float(i), i % 2, 2 - i % 2) for i in range(4000)]
    steps = series.units(samples, Window(0.0, 4000.0))
    assert len(steps) <= series.UNIT_STEPS + 1
    assert {(step.prefill_units, step.decode_units) for step in steps} == {(0.5, 1.5)}
