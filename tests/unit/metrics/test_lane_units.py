"""The units of each lane over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.engine.timeline import Record
from pdmux_ray.metrics.lane_units import BRIDGE_S, UnitsChange, means, together, units_changes

from .records import block, one_pass, step


def test_units_of_lanes_follow_their_blocks_and_steps() -> None:
    records: list[Record] = [step(0.0, 1.0, decode_units=4), block(1.0, 4.0), step(1.0, 2.0), step(2.0, 3.0), step(3.0, 4.0)]
    assert units_changes(records) == [UnitsChange(0.0, 0, 4), UnitsChange(1.0, 3, 1), UnitsChange(4.0, 0, 0)]


def test_a_lane_that_waits_for_the_host_alone_keeps_its_units_and_one_that_rests_has_none() -> None:
    short, long = 1.0 + BRIDGE_S / 2, 2.0 + 2 * BRIDGE_S
    assert units_changes([step(0.0, 1.0), step(short, 2.0), step(long, 3.0)]) == [
        UnitsChange(0.0, 0, 1),
        UnitsChange(2.0, 0, 0),
        UnitsChange(long, 0, 1),
        UnitsChange(3.0, 0, 0),
    ]


def test_one_pass_shares_the_device_by_tokens() -> None:
    records = [one_pass(0.0, 1.0, 0, 9), one_pass(1.0, 2.0, 3, 9), one_pass(2.0, 3.0, 5, 0)]
    assert units_changes(records) == [
        UnitsChange(0.0, 4, 0),
        UnitsChange(1.0, 3, 1),
        UnitsChange(2.0, 0, 4),
        UnitsChange(3.0, 0, 0),
    ]


def test_a_step_without_decodes_leaves_their_lane_at_rest() -> None:
    assert units_changes([step(0.0, 1.0, decodes=0)]) == []


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4), st.integers(0, 4)), max_size=20),
    st.integers(1, 30),
)
def test_means_keep_the_units_seconds_of_each_lane(changes: list[tuple[float, int, int]], stretches: int) -> None:
    ordered = [UnitsChange(*change) for change in sorted(changes)]
    found = means(ordered, 2.0, 8.0, stretches)
    assert len(found) == stretches
    ends = [*(change.at_s for change in ordered[1:]), 8.0]
    for lane in (1, 2):
        exact = sum(
            max(0.0, min(end, 8.0) - max(change.at_s, 2.0)) * change[lane] for change, end in zip(ordered, ends, strict=False)
        )
        assert sum(mean[lane] for mean in found) * 6.0 / stretches == pytest.approx(exact, abs=1e-6)


def test_the_units_of_several_instances_add_up() -> None:
    one = [UnitsChange(0.0, 3, 1), UnitsChange(2.0, 0, 4)]
    assert together([one, [UnitsChange(1.0, 4, 0)]]) == [
        UnitsChange(0.0, 3, 1),
        UnitsChange(1.0, 7, 1),
        UnitsChange(2.0, 4, 4),
    ]
    assert together([one]) == one
