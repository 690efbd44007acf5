from __future__ import annotations

import random

import pytest

from pdmux_ray.bench.paired import ratio


def test_the_ratio_is_the_median_of_the_pairs_whatever_disturbed_both_of_one() -> None:
    quiet, busy = [1.0] * 20, [30.0] * 5
    found = ratio([0.9 * under for under in (*quiet, *busy)], [*quiet, *busy])
    assert (found.median, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))


def test_the_interval_holds_the_median_of_noisy_pairs_and_is_narrower_with_more() -> None:
    rng = random.Random(1)
    widths = []
    for count in (10, 100, 1000):
        found = ratio([rng.lognormvariate(0.0, 0.2) for _ in range(count)], [1.0] * count)
        assert found.low <= found.median <= found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert found.low < 1.0 < found.high


def test_what_is_no_pair_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="one pair"):
        ratio([], [])
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])
