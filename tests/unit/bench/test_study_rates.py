from __future__ import annotations

from itertools import pairwise

from pdmux_ray.bench.study_rates import rates
from pdmux_ray.tune.grid import nearest


def test_the_grid_ascends_in_equal_steps_around_what_is_carried() -> None:
    found = rates(5.0, 0.1)
    assert found[0] < 1.0
    assert found[-1] > 5.5
    assert all(1.1 < after / before < 1.14 for before, after in pairwise(found))
    assert found[nearest(found, 2.5)] == min(found, key=lambda rate: abs(rate - 2.5))


def test_a_grid_has_no_rate_under_the_least_that_can_be_decided_but_always_one() -> None:
    assert rates(5.0, 0.88)[0] == 0.88
    assert rates(0.1, 0.88) == [0.88]
