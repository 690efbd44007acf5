from __future__ import annotations

import pytest

from pdmux_ray.costs.pace import Pace, Timed, joined


def recorded(*records: list[Timed]) -> Pace:
    pace = joined(records)
    assert pace is not None
    return pace


STALL = recorded([Timed(5.0, 5.1, 1.0), Timed(5.1, 5.4, 3.0), Timed(5.4, 5.5, 1.0)])  # for 0.3 s a third as fast


def test_work_takes_as_many_times_as_long_as_it_did_at_that_moment() -> None:
    assert STALL.lasts_s(0.0, 0.05) == pytest.approx(0.05)
    assert STALL.lasts_s(0.1, 0.05) == pytest.approx(0.15)


def test_work_amid_which_the_pace_changes_is_slowed_in_part() -> None:
    assert STALL.lasts_s(0.08, 0.05) == pytest.approx(0.02 + 3 * 0.03)
    assert STALL.lasts_s(0.37, 0.05) == pytest.approx(0.03 + 0.04)
    assert STALL.lasts_s(0.05, 0.2) == pytest.approx(0.05 + 0.3 + 0.05)


def test_it_begins_again_at_its_end() -> None:
    assert STALL.lasts_s(0.5, 0.05) == STALL.lasts_s(0.0, 0.05)
    assert STALL.lasts_s(0.45, 0.15) == pytest.approx(0.05 + 0.1)
    assert STALL.lasts_s(0.0, 0.3 * 10) == pytest.approx(0.5 * 10)  # ten times all of it
    assert STALL.lasts_s(0.5 * 7, 0.3) == pytest.approx(0.5)


def test_all_of_the_record_done_again_takes_as_long_as_it_did() -> None:
    now_s = 0.0
    for work_s in (0.1, 0.1, 0.1):  # what its three steps take in the mean
        now_s += STALL.lasts_s(now_s, work_s)
    assert now_s == pytest.approx(0.5)


def test_time_in_which_nothing_ran_is_cut_out_and_servers_follow_each_other() -> None:
    pace = recorded([Timed(5.0, 5.1, 1.0), Timed(9.0, 9.1, 2.0)], [Timed(0.5, 0.6, 4.0)], [])
    assert pace.begins_s == pytest.approx((0.0, 0.1, 0.2))
    assert pace.length_s == pytest.approx(0.3)
    assert pace.lasts_s(0.2, 0.02) == pytest.approx(0.08)


def test_what_ran_beside_counts_until_the_other_lane_begins_something() -> None:
    pace = recorded([Timed(0.0, 1.0, 1.0), Timed(0.1, 0.2, 2.0), Timed(0.5, 0.6, 4.0)])
    assert (pace.begins_s, pace.length_s) == ((0.0, 0.1, 0.5), 1.0)


def test_without_steps_there_is_none() -> None:
    assert joined([[], []]) is None
