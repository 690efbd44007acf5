"""When requests come: the offered rate is exact, and the gaps have the shape that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload import arrivals
from pdmux_ray.workload.requests import Ask

ASK = Ask((1, 2, 3), 4)


def variation(times: list[float]) -> float:
    """Coefficient of variation of the gaps."""
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("burstiness", [0.01, 0.1, 1.0, 10.0])
def test_times_ascend_and_lie_within_count_over_rate(burstiness: float) -> None:
    times = arrivals.gamma(1000, 8.0, burstiness, seed=3)
    assert len(times) == 1000
    assert times[0] >= 0
    assert times[-1] <= 125.0
    assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float, expected: float) -> None:
    assert variation(arrivals.gamma(20_000, 5.0, burstiness, seed=1)) == pytest.approx(expected, rel=0.05)


def test_poisson_arrivals_are_spread_evenly_over_the_whole_span() -> None:
    """Conditional on their count they are uniform: every tenth of the span has its tenth, the last one too."""
    counts, _ = np.histogram(arrivals.poisson(20_000, 100.0, seed=2), bins=10, range=(0, 200))
    assert counts.min() > 1800
    assert counts.max() < 2200


def test_the_rate_only_stretches_the_same_arrivals() -> None:
    slow, fast = arrivals.poisson(50, 1.0, seed=7), arrivals.poisson(50, 4.0, seed=7)
    assert slow == pytest.approx([4 * time for time in fast])


def test_the_seed_decides() -> None:
    assert arrivals.poisson(20, 1.0, seed=1) == arrivals.poisson(20, 1.0, seed=1) != arrivals.poisson(20, 1.0, seed=2)


def test_a_trace_keeps_its_bursts_and_gets_the_rate() -> None:
    assert arrivals.rescaled([10.0, 10.0, 11.0, 14.0], rate_rps=2.0) == pytest.approx([0.0, 0.0, 0.5, 2.0])


def test_one_request_of_a_trace_comes_at_once() -> None:
    assert arrivals.rescaled([12.0], 3.0) == [0.0]


def test_plan_pairs_each_request_with_its_time() -> None:
    planned = arrivals.plan([ASK, ASK], [0.5, 1.5])
    assert [(request.index, request.due_s, request.ask) for request in planned] == [(0, 0.5, ASK), (1, 1.5, ASK)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: arrivals.poisson(0, 1.0, 0), "at least one request"),
        (lambda: arrivals.poisson(5, 0.0, 0), "The rate must be"),
        (lambda: arrivals.poisson(5, float("nan"), 0), "The rate must be"),
        (lambda: arrivals.poisson(5, 1.0, -1), "A seed is 0 or more"),
        (lambda: arrivals.gamma(5, 1.0, 0.0, 0), "Burstiness must be"),
        (lambda: arrivals.rescaled([], 1.0), "at least one request"),
        (lambda: arrivals.rescaled([1.0, 1.0], 1.0), "come at the same time"),
        (lambda: arrivals.rescaled([2.0, 1.0], 1.0), "must ascend"),
        (lambda: arrivals.plan([ASK], [1.0, 2.0]), "1 requests cannot come at 2 times"),
        (lambda: arrivals.plan([ASK, ASK], [2.0, 1.0]), "must ascend"),
    ],
)
def test_what_cannot_be_planned_is_a_named_error(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(("text", "shown"), [("poisson", "poisson"), ("gamma:0.5", "gamma:0.5"), ("trace", "trace")])
def test_arrivals_are_read(text: str, shown: str) -> None:
    assert str(arrivals.Arrivals.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "uniform", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:nan", "gamma:inf", "poisson:2"]
)
def test_arrivals_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        arrivals.Arrivals.parse(text)


def test_a_traces_own_times_are_stretched_to_the_rate() -> None:
    asks = [Ask((1,), 1, trace_s) for trace_s in (0.0, 1.0, 4.0)]
    assert arrivals.Arrivals("trace").due_s(asks, 0.5, 0) == pytest.approx([0.0, 1.5, 6.0])
