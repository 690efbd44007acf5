"""Reads a table of SGLang's `--pdmux-config-path` as it is. What is wrong is said with its line and with what is right."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.sglang import MIN_GROUP_NUM, Division, Grain, PublishedRule, PublishedTable, misfits

_NUMBERS = {"sm_group_num": MIN_GROUP_NUM, "split_forward_token_budget": 1, "decode_bs_divisor": 1}  # key -> the smallest
_KEYS = (*_NUMBERS, "manual_divisions")


def load_rule(path: str | None, units: int, grain: Grain) -> PublishedRule:
    """The rule of a file, or the published defaults, for a device of `units`. Raises ConfigError."""
    table, lines = _read(Path(path).expanduser()) if path else (PublishedTable(), [])
    if wrong := misfits(table.divisions, units, grain):
        raise ConfigError("\n".join(f"{path}, line {lines[row]}: {why}." for row, why in wrong.items()))
    try:
        return PublishedRule.of(table, units, grain)
    except ValueError as error:
        raise ConfigError(f"engine.multiplex.policy sglang: {error}. Use mode prefill_first or chunked here.") from None


def load_table(path: str) -> PublishedTable:
    """Checks all that can be checked without a device. Raises ConfigError."""
    return _read(Path(path).expanduser())[0]


def _read(path: Path) -> tuple[PublishedTable, list[int]]:
    """And the line of each of its divisions."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"engine.multiplex.table: cannot read {path.absolute()}: {error}") from None
    reader = _Reader(path)
    if root is None:
        return PublishedTable(), []
    if not isinstance(root, yaml.MappingNode):
        raise reader.error(root, f"a mapping with {', '.join(_KEYS)} stands here")
    return reader.table(root)


class _Reader:
    """Of one file. Every error names a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {node.start_mark.line + 1}: {text}.")

    def table(self, root: yaml.MappingNode) -> tuple[PublishedTable, list[int]]:
        nodes: dict[str, yaml.Node] = {}
        for key, value in root.value:
            if key.value not in _KEYS:
                near = difflib.get_close_matches(str(key.value), _KEYS, n=1)
                right = f"did you mean {near[0]}" if near else f"there are {', '.join(_KEYS)}"
                raise self.error(key, f"no such key {key.value}; {right}")
            if key.value in nodes:
                raise self.error(key, f"{key.value} stands here for the second time; once is enough")
            nodes[key.value] = value
        numbers = {key: self._number(nodes[key], key, least) for key, least in _NUMBERS.items() if key in nodes}
        defaults = PublishedTable()
        groups = numbers.get("sm_group_num", defaults.sm_group_num)
        divisions, lines = self._divisions(nodes.get("manual_divisions"), groups)
        table = PublishedTable(
            groups,
            divisions,
            numbers.get("split_forward_token_budget", defaults.token_budget),
            numbers.get("decode_bs_divisor", defaults.decode_bs_divisor),
        )
        return table, lines

    def _number(self, node: yaml.Node, what: str, least: int) -> int:
        value = yaml.constructor.SafeConstructor().construct_object(node, deep=True)
        if type(value) is not int or value < least:
            raise self.error(node, f"{what} is a whole number, {least} or more, not {value!r}")
        return value

    def _divisions(self, node: yaml.Node | None, groups: int) -> tuple[tuple[Division, ...], list[int]]:
        """None and an empty list: the automatic splits."""
        if node is None or node.tag == "tag:yaml.org,2002:null" or node.value == []:
            return (), []
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, "manual_divisions is a list of [prefill units, decode units, decode requests]")
        rows = [self._division(row) for row in node.value]
        if len(rows) != groups - 2:
            raise self.error(
                node,
                f"sm_group_num {groups} goes with {groups - 2} manual_divisions (one group is prefill's alone, one decode's); "
                f"here are {len(rows)}: write sm_group_num: {len(rows) + 2}",
            )
        for row, before, after in zip(node.value[1:], rows, rows[1:], strict=False):
            self._in_order(row, before, after)
        return tuple(rows), [row.start_mark.line + 1 for row in node.value]

    def _division(self, node: yaml.Node) -> Division:
        if not isinstance(node, yaml.SequenceNode) or len(node.value) != 3:
            raise self.error(node, "a division is [prefill units, decode units, decode requests from which it counts]")
        names = (("prefill units", 1), ("decode units", 1), ("decode requests", 0))
        return Division(*(self._number(part, name, least) for part, (name, least) in zip(node.value, names, strict=True)))

    def _in_order(self, node: yaml.Node, before: Division, after: Division) -> None:
        if after.decode_batch <= before.decode_batch:
            raise self.error(
                node,
                f"the last number of each division is larger than the one above it; {after.decode_batch} follows "
                f"{before.decode_batch}: write {before.decode_batch + 1} or more, or sort the divisions",
            )
        if after.decode_units < before.decode_units:
            raise self.error(
                node,
                f"more decode requests have no fewer decode units; {after.decode_units} follow {before.decode_units}. "
                "A division is [prefill units, decode units, decode requests]",
            )
