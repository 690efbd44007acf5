from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest

from pdmux_ray.bench.goodput_coverage import SHARES, SLOTS, coverage, independent, queue, rows


def test_the_interval_of_independent_requests_holds_the_truth_about_as_often_as_it_says() -> None:
    held, width = coverage(independent, tuple(SHARES), requests=200, series=40, seed=1)
    assert held >= 0.85
    assert 0.1 < width < 0.4


@pytest.mark.parametrize("mean_misses", [1, 5, 20])
def test_misses_in_rows_are_as_many_and_as_long_as_is_said(mean_misses: int) -> None:
    good = rows(mean_misses, random.Random(3), 4, 100_000)
    begun = sum(before and not after for before, after in pairwise(good))
    assert sum(good) / len(good) == pytest.approx(SHARES[4], abs=0.02)
    assert good.count(False) / begun == pytest.approx(mean_misses, rel=0.15)


def test_a_queue_is_good_while_slots_are_free_and_each_round_starts_empty() -> None:
    rng = random.Random(3)
    assert all(queue(1, rng, SLOTS * 100.0, SLOTS))
    assert not all(queue(1, rng, SLOTS * 2.0, 500))
    assert all(queue(20, rng, SLOTS * 100.0, 20 * SLOTS))


def test_equal_seeds_simulate_the_same() -> None:
    first, again = (coverage(partial(rows, 5), (1, 4, 6), 50, 5, seed=2) for _ in range(2))
    assert first == again
