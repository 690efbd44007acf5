"""The search for the most work that keeps an objective."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.sharing import largest_that_fits

guesses = st.none() | st.floats(-5, 50)


@given(st.lists(st.booleans(), min_size=1, max_size=40), guesses)
def test_where_more_work_may_be_faster_what_is_taken_fits_all_the_same(fits: list[bool], guess: float | None) -> None:
    found = largest_that_fits(lambda count: fits[count - 1], len(fits), guess)
    assert fits[found - 1] or found == 1
    if all(fits):
        assert found == len(fits)


@given(st.integers(1, 40), st.integers(0, 45), guesses)
def test_the_largest_that_fits_is_found_whatever_is_guessed(high: int, fits: int, guess: float | None) -> None:
    assert largest_that_fits(lambda count: count <= fits, high, guess) == max(1, min(fits, high))


def test_a_good_guess_takes_two_questions() -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count <= 37

    assert largest_that_fits(fits, 80, 37.4) == 37
    assert asked == [37, 38]
