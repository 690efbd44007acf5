from __future__ import annotations

import math
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.pace import EAGER_S, LONGEST_S, PART, SHORTEST_S, Pace

LOOK_S = 10e-6
USUAL_SLACK_NS = 50_000


def looks(seconds: float) -> tuple[int, float]:
    """How many it takes to find what is over after so long, and how late that is."""
    count, now, pace = 0, 0.0, Pace()
    while now < seconds:
        now += pace.pause_s(now, LOOK_S, writes=False) + LOOK_S
        count += 1
    return count, now - seconds


@given(st.floats(1e-6, 10.0))
def test_what_is_over_is_found_late_by_an_eighth_of_its_time_at_most(seconds: float) -> None:
    _, late_s = looks(seconds)
    assert late_s <= max(PART * seconds, SHORTEST_S) + LOOK_S
    assert late_s <= LONGEST_S + LOOK_S


@given(st.floats(1e-6, 10.0))
def test_looks_grow_with_the_logarithm_of_the_time_and_then_with_its_milliseconds(seconds: float) -> None:
    count, _ = looks(seconds)
    rising = math.log(LONGEST_S / SHORTEST_S) / math.log1p(PART)
    assert count <= 1 / PART + rising + seconds / LONGEST_S + 2


def test_a_write_is_asked_for_without_a_pause_for_a_moment_and_a_note_is_not() -> None:
    pace = Pace()
    assert pace.pause_s(EAGER_S / 2, LOOK_S, writes=True) == 0.0
    assert pace.pause_s(EAGER_S / 2, LOOK_S, writes=False) > 0.0
    assert pace.pause_s(EAGER_S, LOOK_S, writes=True) > 0.0


def test_a_look_in_which_nixl_was_busy_is_followed_by_another_at_once() -> None:
    pace = Pace()
    assert pace.pause_s(1.0, 2 * SHORTEST_S, writes=False) == 0.0
    assert pace.pause_s(1.0, SHORTEST_S / 2, writes=False) == LONGEST_S


def test_the_sleeps_of_a_thread_that_waits_are_exact() -> None:
    slack = []

    def wait() -> None:
        own = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
        own.write_text(str(USUAL_SLACK_NS))
        Pace().pause_s(0.0, 0.0, writes=False)
        slack.append(int(own.read_text()))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert slack[0] < USUAL_SLACK_NS / 10
