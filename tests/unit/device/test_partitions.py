"""Which partition a lane runs on."""

from __future__ import annotations

import pytest

from pdmux_ray.device.cuda.green_context import Partition, Partitions
from pdmux_ray.device.cuda.splits import SmResource
from pdmux_ray.types import Split

WHOLE = Partition(132, 132, stream=1, context=10)
LANES = {
    Split(prefill, decode): (Partition(prefill, prefill, decode + 100, 0), Partition(decode, decode, decode, 0))
    for prefill, decode in ((68, 64), (108, 24))
}
PARTITIONS = Partitions(SmResource(132, 8, 8), WHOLE, LANES, structured=True)


def test_a_split_is_two_partitions() -> None:
    split = Split(108, 24)
    assert (PARTITIONS.prefill(split), PARTITIONS.decode(split)) == LANES[split]


def test_splits_come_with_the_fewest_decode_units_first() -> None:
    assert PARTITIONS.splits == (Split(108, 24), Split(68, 64))


def test_in_turns_both_lanes_have_the_whole_device() -> None:
    split = Split(132, 132)
    assert PARTITIONS.prefill(split) is PARTITIONS.decode(split) is WHOLE


def test_a_capped_prefill_runs_where_that_of_the_split_does_and_decode_on_the_whole_device() -> None:
    capped = Split(68, 132)
    assert PARTITIONS.prefill(capped) is PARTITIONS.capped(68) is LANES[Split(68, 64)][0]
    assert PARTITIONS.decode(capped) is WHOLE


@pytest.mark.parametrize("split", [Split(100, 32), Split(108, 64), Split(60, 132)], ids=str)
def test_a_split_that_was_not_made_is_an_error_that_lists_those_that_were(split: Split) -> None:
    with pytest.raises(ValueError, match="the splits are 108/24, 68/64"):
        PARTITIONS.prefill(split)


def test_a_device_that_was_not_divided_has_no_splits() -> None:
    whole = Partitions(SmResource(4, 4, 2), Partition(4, 4, 1, 1), {}, structured=False)
    assert (whole.splits, whole.decode(Split(4, 4)).units) == ((), 4)
