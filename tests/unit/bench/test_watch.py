"""When a load generator must say that it was the trouble itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from pdmux_ray.bench import watch
from pdmux_ray.metrics.lifeline import Lifeline


def watched(*stalls_s: float, quiet_s: float = 10.0) -> watch.LoopWatch:
    looked = watch.LoopWatch(tolerance_s=0.010)
    for _ in range(round(quiet_s / watch.TICK_S)):
        looked.note(watch.TICK_S)
    for stall_s in stalls_s:
        looked.note(watch.TICK_S + stall_s)
    return looked


def test_a_run_on_time_with_short_stalls_counts() -> None:
    assert watch.judged(0.009, 0.010, watched(0.009, 0.05)) is None


def test_late_sends_make_a_run_invalid() -> None:
    assert "sent late: p99 11.0 ms" in str(watch.judged(0.011, 0.010, watched()))


def test_one_long_stall_weighs_as_much_as_many_short_ones() -> None:
    """A loop that stands still cannot look at itself, so stalls are weighed by their time and not by their number."""
    assert "stood still for 4.8% of the run" in str(watch.judged(0.0, 0.010, watched(0.5)))
    assert "stood still for 4.7% of the run" in str(watch.judged(0.0, 0.010, watched(*[0.02] * 25)))


def test_lateness_is_measured_against_the_mean_gap_between_arrivals() -> None:
    assert watch.lateness_tolerance_s([0.0, 1.0, 2.0]) == pytest.approx(0.05)
    assert watch.lateness_tolerance_s([0.0, 0.001, 0.002]) == watch.MIN_LATENESS_S
    assert watch.lateness_tolerance_s([3.0]) == watch.MIN_LATENESS_S


def test_lateness_is_that_of_the_requests_that_were_sent() -> None:
    lines = [Lifeline(due_s=1.0, sent_s=1.0 + late) for late in (0.0, 0.1, 0.2)]
    assert watch.lateness_p99_s([*lines, Lifeline(due_s=9.0)]) == pytest.approx(0.198)
    assert watch.lateness_p99_s([Lifeline(due_s=9.0)]) == 0.0


def test_the_garbage_collector_rests_during_a_run_and_only_then() -> None:
    with watch.no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_client_gives_its_place_in_line_back() -> None:
    before = os.sched_getscheduler(0)
    with watch.first_in_line():
        children = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True, text=True, check=True
        )
    assert (os.sched_getscheduler(0), int(children.stdout)) == (before, before)
