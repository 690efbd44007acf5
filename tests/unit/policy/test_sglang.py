"""The published rule against what its authors' code prints (the printed outputs are this file's data), and what is ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.sglang import (
    CORES,
    GRAINS,
    Division,
    PublishedRule,
    PublishedTable,
    choose_group,
    divide,
    group_table,
    layers_per_step,
    misfits,
)
from pdmux_ray.types import Split

H100 = [(132, 0), (112, 20), (104, 28), (96, 36), (88, 44), (80, 52), (72, 60), (0, 132)]
A100 = [(108, 0), (84, 24), (78, 30), (72, 36), (66, 42), (60, 48), (54, 54), (0, 108)]
H20 = [(78, 0), (56, 22), (48, 30), (40, 38), (0, 78)]
# Of an H100, by the number of decodes beside a prefill.
CHOSEN = {1: (1, 112, 20), 6: (1, 112, 20), 12: (2, 104, 28), 18: (3, 96, 36), 24: (4, 88, 44), 30: (5, 80, 52)} | {
    many: (6, 72, 60) for many in (36, 64)
}
LAYERS_OF_36 = {512: 36, 8192: 8, 32768: 2, 131072: 1}  # by the prompt's tokens

# SGLang's documentation, for an H200.
DOCUMENTED = tuple(
    Division(*row) for row in ((112, 20, 1), (104, 28, 5), (96, 36, 10), (80, 52, 15), (64, 68, 20), (56, 76, 25))
)


def rule(units: int = 132, major: int = 9, **table: int) -> PublishedRule:
    return PublishedRule.of(PublishedTable(**table), units, GRAINS[major])


@pytest.mark.parametrize(("units", "major", "groups"), [(132, 9, H100), (108, 8, A100), (78, 9, H20)])
def test_the_groups_are_the_published_ones(units: int, major: int, groups: list[tuple[int, int]]) -> None:
    splits = divide(units, 6, *GRAINS[major])
    assert [(split.prefill_units, split.decode_units) for split in group_table(units, splits)] == groups
    assert rule(units, major).splits == tuple(splits)


@pytest.mark.parametrize(("decodes", "chosen"), CHOSEN.items())
def test_the_choice_by_decodes_is_the_published_one(decodes: int, chosen: tuple[int, int, int]) -> None:
    number, prefill, decode = chosen
    assert choose_group(len(H100), decodes, has_prefill=True) == number
    assert H100[number] == (prefill, decode)
    assert rule().split(decodes) == Split(prefill, decode)


def test_a_phase_that_is_alone_has_all_units() -> None:
    assert H100[choose_group(len(H100), 32, has_prefill=False)] == (0, 132)
    assert H100[choose_group(len(H100), 0, has_prefill=True)] == (132, 0)


@pytest.mark.parametrize(("tokens", "layers"), LAYERS_OF_36.items())
def test_the_layers_of_a_step_are_the_published_ones(tokens: int, layers: int) -> None:
    assert layers_per_step(tokens, 36) == layers
    assert rule().choose(30, tokens, 36) == (Split(80, 52), layers)


def test_a_smaller_divisor_reaches_the_last_split_earlier() -> None:
    assert (rule().split(35), rule().split(36)) == (Split(80, 52), Split(72, 60))
    assert (rule(decode_bs_divisor=24).split(23), rule(decode_bs_divisor=24).split(24)) == (Split(80, 52), Split(72, 60))


@pytest.mark.parametrize(
    ("decodes", "split"),
    [(0, (112, 20)), (1, (112, 20)), (4, (112, 20)), (5, (104, 28)), (19, (80, 52)), (20, (64, 68)), (500, (56, 76))],
)
def test_a_table_counts_from_its_thresholds_on(decodes: int, split: tuple[int, int]) -> None:
    table = PublishedTable(8, DOCUMENTED)
    assert PublishedRule.of(table, 132, GRAINS[9]).split(decodes) == Split(*split)


def test_below_the_first_threshold_the_first_split_counts() -> None:
    table = PublishedTable(4, (Division(104, 28, 8), Division(96, 36, 16)))
    found = PublishedRule.of(table, 132, GRAINS[9])
    assert [found.split(decodes) for decodes in (1, 7, 8, 16)] == [Split(104, 28)] * 3 + [Split(96, 36)]


@pytest.mark.parametrize(
    ("cores", "splits"),
    [
        (2, [(1, 1)]),
        (3, [(2, 1)]),
        (4, [(3, 1), (2, 2)]),
        (8, [(7, 1), (6, 2), (5, 3), (4, 4)]),
        (16, [(13, 3), (12, 4), (11, 5), (10, 6), (9, 7), (8, 8)]),
    ],
)
def test_a_device_of_few_units_still_has_splits(cores: int, splits: list[tuple[int, int]]) -> None:
    assert PublishedRule.of(PublishedTable(), cores, CORES).splits == tuple(Split(*split) for split in splits)


def test_on_two_cores_any_number_of_decodes_has_one_and_a_lone_phase_both() -> None:
    found = PublishedRule.of(PublishedTable(), 2, CORES)
    assert {found.split(decodes) for decodes in range(100)} == {Split(1, 1)}
    assert group_table(2, found.splits) == [Split(2, 0), Split(1, 1), Split(0, 2)]


def test_a_device_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="1 units cannot be divided"):
        PublishedRule.of(PublishedTable(), 1, CORES)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ((112, 28, 1), "112 + 28 is 140, but the device has 132 units; beside 112 for prefill there are 20 for decode"),
        ((100, 32, 1), "prefill cannot have 100 of 132 units: .* steps of 8; near are 96/36 and 104/28"),
        ((128, 4, 1), "at least 8, .* near are 112/20 and 120/12"),
    ],
)
def test_a_row_that_does_not_fit_says_what_would(row: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"^row 2: .*{why.replace('+', '[+]')}$"):
        PublishedRule.of(PublishedTable(4, (DOCUMENTED[0], Division(*row))), 132, GRAINS[9])
    assert misfits(DOCUMENTED, 132, GRAINS[9]) == {}


@given(
    units=st.integers(2, 200),
    major=st.sampled_from(sorted(GRAINS)),
    groups=st.integers(3, 12),
    divisor=st.integers(1, 100),
    decodes=st.integers(0, 300),
)
def test_every_split_is_legal_and_more_decodes_never_have_fewer_units(
    units: int, major: int, groups: int, divisor: int, decodes: int
) -> None:
    grain = GRAINS[major]
    if not divide(units, groups - 2, *grain):
        return
    found = PublishedRule.of(PublishedTable(groups, decode_bs_divisor=divisor), units, grain)
    assert len(found.splits) <= groups - 2
    assert misfits([Division(s.prefill_units, s.decode_units, 0) for s in found.splits], units, grain) == {}
    assert found.split(decodes).decode_units <= found.split(decodes + 1).decode_units
