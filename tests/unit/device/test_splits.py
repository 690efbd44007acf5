from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.device.cuda.splits import SmResource, decode_is_group, feasible_splits, possible_splits
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Split

H200 = SmResource(132, 8, 8)
A100 = SmResource(108, 4, 2)
RTX_5090 = SmResource(170, 8, 8)  # compute capability 12.0


def resources() -> st.SearchStrategy[SmResource]:
    granularities = st.sampled_from([(4, 2), (8, 8), (2, 2), (1, 1), (16, 8)])
    return st.builds(lambda count, granularity: SmResource(count, *granularity), st.integers(2, 200), granularities)


@pytest.mark.parametrize(
    ("resource", "decode"),
    [(H200, [16, 32, 48, 64, 80, 96]), (A100, [14, 26, 40, 54, 68, 80]), (RTX_5090, [24, 40, 64, 88, 104, 128])],
    ids=["132", "108", "170"],
)
def test_decode_levels_are_spread_over_the_device(resource: SmResource, decode: list[int]) -> None:
    assert [split.decode_units for split in feasible_splits(resource)] == decode


@given(resources())
def test_a_split_is_disjoint_complete_and_large_enough(resource: SmResource) -> None:
    for split in possible_splits(resource):
        assert split.prefill_units + split.decode_units == resource.count
        assert min(split.prefill_units, split.decode_units) >= resource.minimum


@given(resources())
def test_decode_is_a_group_in_every_split_that_nobody_asked_for(resource: SmResource) -> None:
    for split in feasible_splits(resource):
        assert decode_is_group(resource, split)
        assert split.decode_units % resource.alignment == 0


@given(resources())
def test_splits_come_with_the_fewest_decode_units_first_and_once_each(resource: SmResource) -> None:
    units = [split.decode_units for split in feasible_splits(resource)]
    assert units == sorted(set(units))


@given(resources())
def test_a_device_with_room_for_two_parts_has_a_split(resource: SmResource) -> None:
    group = -(-resource.minimum // resource.alignment) * resource.alignment
    assert bool(feasible_splits(resource)) == (resource.count >= group + resource.minimum)


@given(resources(), st.data())
def test_what_is_asked_for_and_feasible_is_made_whatever_its_order(resource: SmResource, data: st.DataObject) -> None:
    possible = possible_splits(resource)
    chosen = data.draw(st.lists(st.sampled_from(possible), max_size=6)) if possible else []
    asked = [(split.prefill_units, split.decode_units) for split in chosen]
    assert feasible_splits(resource, asked) == tuple(split for split in possible if split in chosen)


@given(resources(), st.integers(0, 200), st.integers(0, 200))
def test_what_is_asked_for_is_made_or_refused(resource: SmResource, prefill: int, decode: int) -> None:
    if Split(prefill, decode) in possible_splits(resource):
        assert feasible_splits(resource, [(prefill, decode)]) == (Split(prefill, decode),)
    else:
        with pytest.raises(ConfigError, match=f"{prefill}/{decode}"):
            feasible_splits(resource, [(prefill, decode)])


@pytest.mark.parametrize("asked", [(112, 20), (104, 28), (96, 36), (80, 52), (64, 68), (56, 76)], ids=str)
def test_sglangs_splits_for_an_h200_are_feasible(asked: tuple[int, int]) -> None:
    assert feasible_splits(H200, [asked]) == (Split(*asked),)


@pytest.mark.parametrize("asked", [(100, 24), (130, 2), (126, 6), (132, 0), (110, 22)], ids=str)
def test_an_infeasible_split_is_refused_with_every_feasible_one(asked: tuple[int, int]) -> None:
    with pytest.raises(ConfigError) as refusal:
        feasible_splits(H200, [(108, 24), asked])
    message = str(refusal.value)
    assert message.startswith(f"engine.cuda.splits: {asked[0]}/{asked[1]} (prefill/decode) cannot be made of 132 SMs")
    assert message.endswith("28/104, 24/108, 20/112, 16/116, 12/120, 8/124.")
    assert "124/8, 120/12, 116/16" in message


def test_a_device_that_cannot_be_divided_says_so_when_it_is_asked_to() -> None:
    with pytest.raises(ConfigError, match="Feasible here: none"):
        feasible_splits(SmResource(12, 8, 8), [(6, 6)])


def test_nothing_asked_for_is_no_split() -> None:
    assert feasible_splits(H200, []) == ()
