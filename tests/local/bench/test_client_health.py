"""When a load generator must say that it was the trouble itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from pdmux_ray.bench.load import client_health
from pdmux_ray.metrics.lifeline import Lifeline


def watched(*stalls_s: float, quiet_s: float = 10.0) -> client_health.LoopWatch:
    looked = client_health.LoopWatch(tolerance_s=0.010)
    for _ in range(round(quiet_s / client_health.TICK_S)):
        looked.note(client_health.TICK_S)
    for stall_s in stalls_s:
        looked.note(client_health.TICK_S + stall_s)
    return looked


def test_a_run_on_time_with_short_stalls_counts() -> None:
    assert client_health.judged(0.009, 0.010, watched(0.009, 0.05)) is None


def test_late_sends_make_a_run_invalid() -> None:
    assert "sent late: p99 11.0 ms" in str(client_health.judged(0.011, 0.010, watched()))


def test_one_long_stall_weighs_as_much_as_many_short_ones() -> None:
    """A loop that stands still cannot look at itself, so stalls are weighed by their time and not by their number."""
    assert "stood still for 4.8% of the run" in str(client_health.judged(0.0, 0.010, watched(0.5)))
    assert "stood still for 4.7% of the run" in str(client_health.judged(0.0, 0.010, watched(*[0.02] * 25)))


def test_lateness_is_measured_against_the_mean_gap_between_arrivals() -> None:
    assert client_health.lateness_tolerance_s([0.0, 1.0, 2.0]) == pytest.approx(0.05)
    assert client_health.lateness_tolerance_s([0.0, 0.001, 0.002]) == client_health.MIN_LATENESS_S
    assert client_health.lateness_tolerance_s([3.0]) == client_health.MIN_LATENESS_S


def test_a_client_without_connections_left_measured_itself() -> None:
    assert "no connection left for 3 requests" in str(client_health.judged(0.0, 0.010, watched(), 3))


def test_lateness_is_that_of_the_requests_that_were_sent() -> None:
    lines = [Lifeline(due_s=1.0, sent_s=1.0 + late) for late in (0.0, 0.1, 0.2)]
    assert client_health.lateness_p99_s([*lines, Lifeline(due_s=9.0)]) == pytest.approx(0.198)
    assert client_health.lateness_p99_s([Lifeline(due_s=9.0)]) == 0.0


def test_the_garbage_collector_rests_during_a_run_and_only_then() -> None:
    with client_health.no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_client_gives_its_place_in_line_back() -> None:
    before = os.sched_getscheduler(0)
    with client_health.first_in_line():
        children = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True, text=True, check=True
        )
    assert (os.sched_getscheduler(0), int(children.stdout)) == (before, before)
