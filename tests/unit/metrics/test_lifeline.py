from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.metrics.lifeline import Ending, Lifeline, quantile
from tests.unit.metrics.lifelines import arrivals, lifelines, noted, served


def test_ttft_and_end_to_end_count_from_the_planned_arrival_however_late_it_was_sent() -> None:
    lifeline = served(12.0, 12.5, 13.5, due_s=10.0, sent_s=11.5)
    assert (lifeline.ttft_s, lifeline.e2e_s) == (2.0, 3.5)


def test_an_itl_is_the_gap_between_two_arrivals() -> None:
    assert served(1.0, 1.5, 3.5).gaps_s == [0.5, 2.0]


def test_tokens_that_arrive_together_are_one_arrival_and_leave_no_zeros_among_the_gaps() -> None:
    lifeline = served((1.0, 2), (3.0, 8), 3.5)
    assert len(lifeline.token_s) == 11
    assert lifeline.gaps_s == [2.0, 0.5]


def test_tpot_counts_every_token_even_of_one_arrival() -> None:
    assert served((1.0, 2), (3.0, 2), 5.0).tpot_s == 1.0


def test_the_news_of_a_token_says_the_gap_that_it_ends() -> None:
    assert noted(Lifeline(0.0), [1.0, 1.5, 1.5, (3.5, 4)]) == [None, 0.5, None, 2.0]


@given(arrivals)
def test_gaps_are_the_same_as_they_come_and_afterwards(of: list[tuple[float, int]]) -> None:
    lifeline, now_s, told = Lifeline(0.0), 0.0, []
    for after_s, count in of:
        now_s += after_s
        told.append(lifeline.tokens_arrived(now_s, count))
    assert [gap for gap in told if gap is not None] == lifeline.gaps_s


@pytest.mark.parametrize("tokens", [0, 1])
def test_without_two_tokens_there_is_no_gap_and_no_tpot(tokens: int) -> None:
    lifeline = served(*[1.0] * tokens)
    assert (lifeline.gaps_s, lifeline.tpot_s) == ([], None)


def test_without_a_token_there_is_nothing_to_time() -> None:
    lifeline = Lifeline(5.0)
    lifeline.fail(6.0, "HTTP 503")
    assert (lifeline.ttft_s, lifeline.e2e_s, lifeline.gaps_s) == (None, None, [])
    assert (lifeline.ending, lifeline.error, lifeline.ended_s) == (Ending.ERROR, "HTTP 503", 6.0)


def test_end_to_end_is_only_of_complete_requests() -> None:
    lifeline = Lifeline(0.0)
    lifeline.tokens_arrived(1.0)
    assert (lifeline.ending, lifeline.e2e_s) == (Ending.UNFINISHED, None)
    lifeline.fail(2.0, "cut off")
    assert lifeline.e2e_s is None


@pytest.mark.parametrize(
    ("tokens", "asked", "ending"),
    [
        (3, None, Ending.COMPLETE),
        (3, 3, Ending.COMPLETE),
        (4, 3, Ending.COMPLETE),
        (2, 3, Ending.TRUNCATED),
        (0, 3, Ending.TRUNCATED),
        (0, None, Ending.TRUNCATED),
    ],
)
def test_an_answer_with_fewer_tokens_than_asked_or_with_none_is_truncated(tokens: int, asked: int, ending: Ending) -> None:
    lifeline = Lifeline(0.0, asked_tokens=asked)
    noted(lifeline, [1.0] * tokens)
    lifeline.complete(2.0, "stop")
    assert (lifeline.ending, lifeline.finish_reason) == (ending, "stop")


@given(lifelines())
def test_figures_of_any_request_are_finite_and_fit_each_other(lifeline: Lifeline) -> None:
    tokens = len(lifeline.token_s)
    assert all(gap > 0 and math.isfinite(gap) for gap in lifeline.gaps_s)
    assert (lifeline.ttft_s is None) == (tokens == 0)
    if lifeline.tpot_s is not None:
        assert lifeline.tpot_s * (tokens - 1) == pytest.approx(sum(lifeline.gaps_s), abs=1e-6)
    if lifeline.e2e_s is not None and lifeline.ttft_s is not None:
        assert lifeline.e2e_s == pytest.approx(lifeline.ttft_s + sum(lifeline.gaps_s), abs=1e-6)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_the_ends_of_the_quantiles_are_the_least_and_the_greatest() -> None:
    assert (quantile([1.0, 2.0, 5.0], 0), quantile([1.0, 2.0, 5.0], 1), quantile([7.0], 0.3)) == (1.0, 5.0, 7.0)
