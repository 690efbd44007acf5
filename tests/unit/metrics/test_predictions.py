from __future__ import annotations

import pytest

from pdmux_ray.metrics.predictions import Judged


def test_the_share_over_the_bound_and_the_errors_are_of_predicted_steps_alone() -> None:
    judged = Judged.of([(1.0, 1.1, 1.0), (1.0, 1.1, 1.25), (1.0, 1.1, 0.8), (None, None, 9.0)])
    assert judged is not None
    assert (judged.steps, judged.over_share) == (3, pytest.approx(1 / 3))
    assert (judged.median_error, judged.p90_error) == (pytest.approx(0.2), pytest.approx(0.24))
    assert Judged.of([(None, None, 1.0)]) is None


def test_a_bound_that_was_rounded_down_is_not_exceeded_by_that() -> None:
    judged = Judged.of([(0.02, 0.021, 0.0210004), (0.02, 0.021, 0.0210014)])
    assert judged is not None
    assert judged.over_share == 0.5
