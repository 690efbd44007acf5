"""Which rate is tried next."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.grid import GridSearch, nearest, probes_allowed, rates


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


def test_a_good_guess_costs_two_runs_and_a_far_one_a_few_more() -> None:
    assert searched(22, 9, 9)[1] == [9, 11, 10]
    assert searched(22, 9, 8)[1] == [9, 7, 8]
    assert len(searched(22, 9, 20)[1]) <= 7


def test_the_grid_ascends_in_equal_steps_around_what_is_carried() -> None:
    found = rates(5.0)
    assert found[0] < 1.0
    assert found[-1] > 5.5
    assert all(1.1 < after / before < 1.14 for before, after in pairwise(found))
    assert found[nearest(found, 2.5)] == min(found, key=lambda rate: abs(rate - 2.5))


def test_searches_share_the_time_that_is_left_within_bounds() -> None:
    assert probes_allowed(left_s=400.0, searches_left=8, probe_s=10.0, least=2, most=7) == 5
    assert probes_allowed(left_s=-50.0, searches_left=8, probe_s=10.0, least=2, most=7) == 2
    assert probes_allowed(left_s=9000.0, searches_left=1, probe_s=10.0, least=2, most=7) == 7
