from __future__ import annotations

import math

import pytest

from pdmux_ray.bench.load.search import Bisection
from pdmux_ray.errors import ConfigError


def searched(bisection: Bisection, limit: float) -> list[tuple[float, bool]]:
    """The probes, where every rate up to `limit` holds."""
    probes: list[tuple[float, bool]] = []
    while (rate := bisection.next_rate()) is not None:
        probes.append((rate, rate <= limit))
        bisection.note(rate, rate <= limit)
    return probes


@pytest.mark.parametrize("limit", [1.0, 1.01, 3.3, 17.0, 63.9])
def test_the_edge_is_enclosed_to_the_tolerance(limit: float) -> None:
    bisection = Bisection(1, 64, 0.05)
    probes = searched(bisection, limit)
    held = max(rate for rate, holds in probes if holds)
    failed = min(rate for rate, holds in probes if not holds)
    assert held <= limit < failed <= held * 1.05
    assert len(probes) <= bisection.most_probes


def test_a_search_ends_at_once_when_even_its_lowest_rate_fails_or_its_highest_holds() -> None:
    assert searched(Bisection(2, 16), 1.0) == [(2, False)]
    assert searched(Bisection(2, 16), 99.0) == [(2, True), (16, True)]


def test_a_tolerance_finer_than_printed_rates_still_ends() -> None:
    probes = searched(Bisection(1, 2, 1e-12), math.sqrt(2))
    assert len(probes) < 40


@pytest.mark.parametrize(("low", "high", "tolerance"), [(0, 1, 0.1), (2, 1, 0.1), (1, 1, 0.1), (1, math.inf, 0.1), (1, 2, 0)])
def test_a_range_without_room_is_refused(low: float, high: float, tolerance: float) -> None:
    with pytest.raises(ConfigError):
        Bisection(low, high, tolerance)
