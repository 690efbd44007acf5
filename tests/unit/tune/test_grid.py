"""Which rate is tried next."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.tune.grid import GridSearch, clearly, decisive
from tests.examples import tried

LEVEL = 0.1


def searched(size: int, start: int, last_that_holds: int) -> tuple[GridSearch, list[int]]:
    """To the end; everything up to `last_that_holds` holds (-1: nothing does)."""
    search, tried = GridSearch(size, start), list[int]()
    while (index := search.next()) is not None:
        tried.append(index)
        search.note(index, index <= last_that_holds)
    return search, tried


@given(size=st.integers(2, 40), start=st.integers(-3, 43), last=st.integers(-1, 39))
def test_a_search_ends_at_the_last_rate_that_holds_and_tries_none_twice(size: int, start: int, last: int) -> None:
    last = min(last, size - 1)
    search, tried = searched(size, start, last)
    assert (search.held, search.failed) == (last if last >= 0 else None, last + 1 if last < size - 1 else None)
    assert len(set(tried)) == len(tried)


def test_a_good_guess_costs_three_runs_and_a_far_one_a_few_more() -> None:
    assert searched(22, 9, 9)[1] == [9, 11, 10]
    assert searched(22, 9, 8)[1] == [9, 7, 8]
    assert len(searched(22, 9, 20)[1]) <= 7


@pytest.mark.parametrize(
    ("good", "count", "clear"),
    [
        (40, 40, True),
        (39, 40, True),
        (38, 40, None),
        (34, 40, None),
        (33, 40, False),
        (22, 22, True),
        (21, 21, None),
        (0, 1, False),
    ],
)
def test_a_share_is_clear_when_chance_seldom_makes_it_of_the_attainment(good: int, count: int, clear: bool | None) -> None:
    assert clearly(good, count, 0.9, LEVEL) is clear


def test_too_few_requests_show_nothing_though_all_are_good() -> None:
    assert clearly(decisive(0.9, LEVEL), decisive(0.9, LEVEL), 0.9, LEVEL) is True
    assert clearly(decisive(0.9, LEVEL) - 1, decisive(0.9, LEVEL) - 1, 0.9, LEVEL) is None


@settings(max_examples=tried(30))
@given(count=st.integers(1, 80), attainment=st.floats(0.5, 0.99))
def test_of_a_server_right_at_the_attainment_at_most_one_result_in_ten_is_called_clear_on_either_side(
    count: int, attainment: float
) -> None:
    chance = [math.comb(count, k) * attainment**k * (1 - attainment) ** (count - k) for k in range(count + 1)]
    verdicts = [clearly(good, count, attainment, LEVEL) for good in range(count + 1)]
    order = [(False, None, True).index(verdict) for verdict in verdicts]
    assert order == sorted(order)  # more good ones never count for less
    for side in (True, False):
        assert sum(c for c, verdict in zip(chance, verdicts, strict=True) if verdict is side) <= LEVEL + 1e-9
