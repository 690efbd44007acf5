"""Tables of the published format: what loads as it is, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.engine.sglang_table import load_rule, load_table
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.sglang import CORES, GRAINS, Division, PublishedRule, PublishedTable
from pdmux_ray.types import Split

ROOT = Path(__file__).parents[3]
H200 = ROOT / "configs" / "tables" / "sglang-h200.yaml"
TWO_CORES = ROOT / "configs" / "tables" / "sglang-2-cores.yaml"


def table_of(folder: Path, text: str) -> str:
    path = folder / "table.yaml"
    path.write_text(text)
    return str(path)


def test_the_documented_table_loads_as_it_is() -> None:
    rule = load_rule(str(H200), 132, GRAINS[9])
    assert [rule.split(decodes) for decodes in (1, 12, 40)] == [Split(112, 20), Split(96, 36), Split(56, 76)]
    assert load_table(str(H200)).divisions[-1] == Division(56, 76, 25)


def test_the_table_for_two_cores_fits_them() -> None:
    assert load_rule(str(TWO_CORES), 2, CORES).splits == (Split(1, 1),)


def test_without_a_file_the_published_defaults_hold() -> None:
    assert load_rule(None, 132, GRAINS[9]) == PublishedRule.of(PublishedTable(), 132, GRAINS[9])


@pytest.mark.parametrize("text", ["", "# nothing but this\n", "manual_divisions: []\n", "manual_divisions:\n"])
def test_what_a_file_leaves_out_is_the_published_default(tmp_path: Path, text: str) -> None:
    assert load_table(table_of(tmp_path, text)) == PublishedTable()


def test_every_key_is_read(tmp_path: Path) -> None:
    text = "sm_group_num: 6\nsplit_forward_token_budget: 8192\ndecode_bs_divisor: 24\n"
    assert load_table(table_of(tmp_path, text)) == PublishedTable(6, (), 8192, 24)


@pytest.mark.parametrize(
    ("text", "line", "right"),
    [
        ("sm_group_num: 8\nsm_groups: 8\n", 2, "did you mean sm_group_num"),
        ("x: 1\n", 1, "there are sm_group_num, split_forward_token_budget, decode_bs_divisor, manual_divisions"),
        ("sm_group_num: 8\nsm_group_num: 9\n", 2, "once is enough"),
        ("sm_group_num: 2\n", 1, "sm_group_num is a whole number, 3 or more, not 2"),
        ("decode_bs_divisor: 0\n", 1, "1 or more, not 0"),
        ("\nsplit_forward_token_budget: 64k\n", 2, "a whole number, 1 or more, not '64k'"),
        ("sm_group_num: true\n", 1, "not True"),
        ("- 1\n", 1, "a mapping with sm_group_num"),
        ("manual_divisions: 3\n", 1, "a list of [prefill units, decode units, decode requests]"),
        ("sm_group_num: 3\nmanual_divisions:\n  - [112, 20]\n", 3, "a division is [prefill units, decode units,"),
        ("sm_group_num: 3\nmanual_divisions:\n  - [112, x, 1]\n", 3, "decode units is a whole number"),
        ("manual_divisions:\n  - [112, 20, 1]\n", 2, "here are 1: write sm_group_num: 3"),
        (
            "sm_group_num: 4\nmanual_divisions:\n  - [112, 20, 5]\n  - [104, 28, 5]\n",
            4,
            "5 follows 5: write 6 or more, or sort the divisions",
        ),
        ("sm_group_num: 4\nmanual_divisions:\n  - [20, 112, 1]\n  - [28, 104, 5]\n", 4, "104 follow 112"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_with_what_is_right(tmp_path: Path, text: str, line: int, right: str) -> None:
    path = table_of(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert right in str(caught.value)


def test_a_table_of_another_device_names_every_row_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        load_rule(str(H200), 108, GRAINS[8])
    first, *others = str(caught.value).splitlines()
    assert ", line 5: 112 + 20 is 132, but the device has 108 units; " in first
    assert len(others) == 5


@pytest.mark.parametrize("text", ["[", "a: b: c", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = str(tmp_path / "none.yaml") if text is None else table_of(tmp_path, text)
    with pytest.raises(ConfigError, match=f"cannot read {path}"):
        load_table(path)


def test_a_device_that_cannot_be_divided_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="Use mode prefill_first or chunked here"):
        load_rule(None, 1, CORES)
