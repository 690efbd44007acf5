from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import ITL_STATISTICS, Bound, RatePoint, Slo, Verdict, fraction_ci, goodput, resampled
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from tests.unit.metrics.lifelines import lifelines, served, stalled_queue

SLO = Slo(ttft_s=1.0, itl_s=0.1)


def test_a_request_at_its_limits_is_good() -> None:
    assert Slo(ttft_s=1.0, itl_s=0.5).verdict(served(1.0, 1.5)) is Verdict.GOOD


def test_both_limits_must_hold_at_once() -> None:
    assert SLO.verdict(served(1.01, 1.05)) is Verdict.TTFT
    assert SLO.verdict(served(0.5, 0.7)) is Verdict.ITL
    assert SLO.verdict(served(1.01, 1.5)) is Verdict.TTFT  # the first that fails names it


def test_a_late_send_counts_against_the_server_that_made_it_late() -> None:
    assert SLO.verdict(served(2.0, due_s=0.5, sent_s=1.9)) is Verdict.TTFT


def test_a_server_that_holds_tokens_back_has_the_gaps_of_its_arrivals() -> None:
    assert SLO.verdict(served((0.5, 1), (0.9, 30), (1.3, 30))) is Verdict.ITL
    mean = Slo(itl_s=0.1, itl_statistic="mean")  # TPOT, which forgives that
    assert mean.verdict(served((0.5, 1), (0.9, 30), (1.3, 30))) is Verdict.GOOD


def test_one_gap_in_a_hundred_may_be_long_at_p99_and_none_at_max() -> None:
    times_s = [0.05 * token for token in range(202)]
    stuttered = served(*times_s[:101], *(time_s + 0.2 for time_s in times_s[101:]))
    assert SLO.verdict(stuttered) is Verdict.GOOD
    assert Slo(itl_s=0.1, itl_statistic="max").verdict(stuttered) is Verdict.ITL


@pytest.mark.parametrize("statistic", [*ITL_STATISTICS, "mean"])
def test_every_statistic_of_equal_gaps_is_the_gap(statistic: str) -> None:
    assert Slo(itl_s=0.1, itl_statistic=statistic).itl_of(served(1.0, 1.5, 2.0)) == 0.5


def test_one_token_has_no_gap_that_could_be_too_long() -> None:
    assert SLO.verdict(served(0.5)) is Verdict.GOOD
    assert SLO.verdict(served((0.5, 20))) is Verdict.GOOD  # all at once, in time


@pytest.mark.parametrize("ending", [Ending.ERROR, Ending.TRUNCATED, Ending.UNFINISHED])
def test_what_is_not_complete_is_a_miss_however_fast_it_was(ending: Ending) -> None:
    lifeline = served(0.1, 0.15)
    lifeline.ending = ending
    assert Slo().verdict(lifeline) is Verdict(ending.value)


def test_an_empty_answer_is_a_miss_whatever_its_client_calls_it() -> None:
    assert Slo().verdict(Lifeline(0.0, ending=Ending.COMPLETE)) is Verdict.TRUNCATED


def test_a_long_prompt_may_take_longer_where_the_slo_says_so() -> None:
    slo = Slo(ttft_s=0.2, ttft_s_per_token=0.001)
    lifeline = served(1.1)
    assert slo.verdict(lifeline) is Verdict.TTFT
    lifeline.prompt_tokens = 1000
    assert slo.verdict(lifeline) is Verdict.GOOD


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_s": 0.0},
        {"ttft_s": -1.0},
        {"ttft_s": math.nan},
        {"ttft_s": math.inf},
        {"itl_s": 0.0},
        {"itl_s": math.nan},
        {"ttft_s_per_token": 0.1},
        {"ttft_s": 1.0, "ttft_s_per_token": -0.1},
        {"ttft_s": 1.0, "ttft_s_per_token": math.nan},
        {"ttft_s": -0.1, "ttft_s_per_token": 0.2},
        {"itl_statistic": "p98"},
    ],
)
def test_limits_that_mean_nothing_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Slo(**fields)  # type: ignore[arg-type]


@given(lifelines(), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0, 10))
def test_a_looser_slo_never_turns_a_good_request_bad(lifeline: Lifeline, ttft_s: float, itl_s: float, more_s: float) -> None:
    if Slo(ttft_s, itl_s).verdict(lifeline) is Verdict.GOOD:
        assert Slo(ttft_s + more_s, itl_s).verdict(lifeline) is Verdict.GOOD
        assert Slo(ttft_s, itl_s + more_s).verdict(lifeline) is Verdict.GOOD
        assert Slo().verdict(lifeline) is Verdict.GOOD


def point(rate_rps: float, good: int, bad: int) -> RatePoint:
    verdicts = [True] * good + [False] * bad
    random.Random(7).shuffle(verdicts)
    return RatePoint(rate_rps, verdicts)


def test_goodput_is_where_the_line_between_two_rates_falls_below_the_attainment() -> None:
    found = goodput([point(4, 80, 20), point(2, 100, 0)], 0.9)
    assert (found.rps, found.bound) == (pytest.approx(3.0), Bound.MEASURED)


def test_goodput_at_exactly_the_attainment_is_the_rate_itself() -> None:
    assert goodput([point(2, 90, 10), point(4, 80, 20)], 0.9).rps == 2


def test_a_rate_that_holds_beyond_one_that_does_not_is_no_goodput() -> None:
    assert goodput([point(1, 100, 0), point(2, 80, 20), point(3, 100, 0)], 0.9).rps == pytest.approx(1.5)


def test_when_every_rate_holds_the_figure_is_a_lower_bound_and_says_so() -> None:
    found = goodput([point(1, 100, 0), point(8, 99, 1)], 0.9)
    assert (found.rps, found.bound) == (8, Bound.AT_LEAST)


def test_when_no_rate_holds_nothing_was_shown_to_hold() -> None:
    found = goodput([point(2, 80, 20), point(4, 0, 100)], 0.9)
    assert (found.rps, found.bound) == (0, Bound.BELOW)


def test_a_server_that_answers_nothing_has_no_goodput() -> None:
    found = goodput([point(2, 0, 100)], 1.0)
    assert (found.rps, found.ci, found.bound) == (0, (0, 0), Bound.BELOW)


@pytest.mark.parametrize("attainment", [0, -0.1, 1.01, 90, math.nan])
def test_an_attainment_that_is_no_share_is_refused(attainment: float) -> None:
    with pytest.raises(ConfigError, match="attainment"):
        goodput([point(1, 1, 0)], attainment)


def test_a_rate_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="No request was sent"):
        RatePoint(2.0, [])


points = st.lists(
    st.builds(RatePoint, st.floats(0.1, 100), st.lists(st.booleans(), min_size=1, max_size=40)),
    min_size=1,
    max_size=6,
    unique_by=lambda point: point.rate_rps,
)


@given(points, st.floats(0.01, 1), st.floats(0.01, 1))
def test_goodput_never_rises_with_the_attainment(measured: list[RatePoint], one: float, other: float) -> None:
    low, high = sorted((one, other))
    loose, strict = (goodput(measured, attainment, resamples=20) for attainment in (low, high))
    assert loose.rps >= strict.rps
    assert all(ours >= theirs for ours, theirs in zip(loose.ci, strict.ci, strict=True))  # equal seeds, equal draws


@given(points, st.floats(0.01, 1))
def test_goodput_is_a_rate_up_to_the_highest_that_was_measured(measured: list[RatePoint], attainment: float) -> None:
    found = goodput(measured, attainment, resamples=20)
    assert 0 <= found.ci[0] <= found.ci[1] <= max(p.rate_rps for p in measured)
    assert 0 <= found.rps <= max(p.rate_rps for p in measured)
    assert goodput(measured[::-1], attainment, resamples=20) == found


def test_the_interval_holds_the_figure_and_narrows_with_more_requests() -> None:
    found = [goodput([point(2, 97 * n, 3 * n), point(4, 80 * n, 20 * n)], 0.9) for n in (1, 4, 16)]
    assert all(goodput_.ci[0] < goodput_.rps < goodput_.ci[1] for goodput_ in found)
    widths = [high - low for low, high in (goodput_.ci for goodput_ in found)]
    assert all(after < 0.7 * before for before, after in pairwise(widths))


def test_misses_in_a_row_say_less_than_as_many_scattered_ones() -> None:
    scattered, together = point(1, 270, 30), RatePoint(1, [True] * 135 + [False] * 30 + [True] * 135)
    (low, high), (wide_low, wide_high) = fraction_ci(scattered), fraction_ci(together)
    assert low < 0.9 < high
    assert wide_high - wide_low > 1.8 * (high - low)


def test_the_interval_of_a_share_is_about_that_of_independent_requests_when_they_are() -> None:
    low, high = fraction_ci(point(1, 900, 100))
    error = 1.96 * math.sqrt(0.9 * 0.1 / 1000)
    assert (low, high) == (pytest.approx(0.9 - error, abs=0.006), pytest.approx(0.9 + error, abs=0.006))


def test_equal_seeds_draw_the_same_requests_of_both_servers() -> None:
    first, other = [point(1, 90, 10), point(2, 70, 30)], [point(1, 95, 5), point(2, 70, 30)]
    assert resampled(first, 0.9, resamples=50) == resampled(first, 0.9, resamples=50)
    assert resampled(first, 0.9, resamples=50, seed=1) != resampled(first, 0.9, resamples=50)
    assert all(a <= b for a, b in zip(resampled(first, 0.9), resampled([other[0], first[1]], 0.9), strict=True))


def test_a_rate_that_only_one_of_two_servers_was_tried_at_changes_none_of_the_requests_that_are_drawn_at_the_others() -> None:
    """Up to the last rate that held all were good, so the place of the fall says how many good ones were drawn at rate 4."""
    fails = point(4, 70, 30)
    once, twice = resampled([point(1, 100, 0), fails], 0.9), resampled([point(1, 100, 0), point(2, 100, 0), fails], 0.9)
    assert [(rps - 1) / 3 for rps in once] == pytest.approx([(rps - 2) / 2 for rps in twice])


def test_a_stalled_server_is_a_miss_for_every_request_that_was_due_meanwhile() -> None:
    stalled = stalled_queue(requests=100, period_s=0.1, begin_s=2.0, end_s=7.0)
    verdicts = [Slo(ttft_s=1.0).verdict(lifeline) for lifeline in stalled]
    assert verdicts.count(Verdict.TTFT) == 40  # due from 2.0 to 5.9; those after waited at most a second
