from __future__ import annotations

import os

import pytest

from pdmux_ray.device.cpu.cores import neighbouring_cores, own_cores, usable_cores


def seen(place: int, count: int | None) -> list[int]:
    with own_cores(place, count):
        return neighbouring_cores()


def test_instances_of_one_machine_have_cores_of_their_own() -> None:
    cores = neighbouring_cores()
    assert [seen(place, 1) for place in range(len(cores))] == [[core] for core in cores]


@pytest.mark.parametrize("count", [None, 1, 10_000])
def test_where_there_are_not_so_many_all_are_shared(count: int | None) -> None:
    cores = neighbouring_cores()
    assert seen(len(cores), count) == cores


def test_only_what_is_opened_within_is_bound_by_it() -> None:
    before = os.sched_getaffinity(0)
    with own_cores(0, 1):
        assert usable_cores() == 1
    assert os.sched_getaffinity(0) == before
