"""What the checks have found: every row is printed, and in report.json, before the next one begins. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from pdmux_ray.metrics.summary import write_whole

FILE_NAME = "report.json"


class Verdict(StrEnum):
    """What a row says of the device."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_JUDGED = "not judged"  # a limit of speed on a device that has none, or what was measured cannot tell
    FIGURE = ""  # there is no limit


@dataclass(frozen=True, slots=True)
class Row:
    """One result."""

    what: str
    value: float | str
    unit: str = ""
    limit: str = ""
    verdict: Verdict = Verdict.FIGURE
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value must keep, in the unit in which it is shown. `speed`: it is one of time, which only a GPU can keep."""

    value: float
    at_least: bool = False
    speed: bool = True

    def holds(self, value: float) -> bool:
        """Never by a NaN."""
        return value >= self.value if self.at_least else value <= self.value

    def row(self, what: str, value: float, unit: str = "", *, judged: bool = True, note: str = "") -> Row:
        """`judged`: the device is one whose speed counts."""
        counts = judged or not self.speed
        verdict = Verdict.NOT_JUDGED if not counts else Verdict.OK if self.holds(value) else Verdict.FAILED
        words = "at least" if self.at_least else "at most"
        return Row(what, value, unit, f"{words} {self.value:g}", verdict, note)


NONE = Limit(0, speed=False)


@dataclass(slots=True)
class Part:
    """What one check has found so far."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    seconds: float | None = None  # None: it was not carried to its end

    @property
    def failed(self) -> bool:
        return any(row.verdict is Verdict.FAILED for row in self.rows)

    @property
    def word(self) -> str:
        if self.failed:
            return Verdict.FAILED
        if self.seconds is None:
            return "interrupted"
        verdicts = {row.verdict for row in self.rows}
        if Verdict.OK not in verdicts:
            return Verdict.NOT_JUDGED
        return "ok, in part" if Verdict.NOT_JUDGED in verdicts else Verdict.OK


class Report:
    """Owner: the command, on one thread. `head`: what the run is of. `show` prints a line."""

    def __init__(self, directory: Path, head: Mapping[str, object], show: Callable[[str], None]) -> None:
        """Raises OSError when the directory cannot be made or written to."""
        self.path = directory / FILE_NAME
        self._head, self._show = dict(head), show
        self.parts: list[Part] = []
        self._complete = False
        self._write()

    @property
    def failed(self) -> bool:
        return any(part.failed for part in self.parts)

    def begin(self, name: str, title: str) -> None:
        self.parts.append(Part(name, title))
        self._write()

    def add(self, row: Row) -> None:
        """To the check that was begun last."""
        self.parts[-1].rows.append(row)
        self._show(line_of(row))
        self._write()

    def end(self, seconds: float) -> None:
        """Of the check that was begun last."""
        self.parts[-1].seconds = round(seconds, 2)
        self._write()

    def close(self, seconds: float) -> None:
        """Every check that was asked for has been carried to its end."""
        self._complete = True
        self._head["seconds"] = round(seconds, 1)
        self._write()

    def _write(self) -> None:
        document = {**self._head, "complete": self._complete, "failed": self.failed}
        parts = [{**asdict(part), "rows": [_as_json(row) for row in part.rows], "result": part.word} for part in self.parts]
        write_whole(self.path, json.dumps({**document, "checks": parts}, indent=1, allow_nan=False) + "\n")


def _as_json(row: Row) -> dict[str, object]:
    """JSON has no word for what is no number."""
    no_number = isinstance(row.value, float) and not math.isfinite(row.value)
    return {**asdict(row), "value": None if no_number else row.value}


def line_of(row: Row) -> str:
    """A row of the table."""
    value = row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
    parts = f"  {row.what:<46} {value:>12} {row.unit:<8} {row.limit:<16} {row.verdict:<10} {row.note}"
    return parts.rstrip()


def summary(parts: list[Part]) -> str:
    """A line for each check."""
    lines = [f"  {'check':<12} {'rows':>5} {'judged':>7} {'failed':>7} {'seconds':>8}  result"]
    for part in parts:
        judged = sum(row.verdict in (Verdict.OK, Verdict.FAILED) for row in part.rows)
        failed = sum(row.verdict is Verdict.FAILED for row in part.rows)
        seconds = "" if part.seconds is None else f"{part.seconds:.1f}"
        lines.append(f"  {part.name:<12} {len(part.rows):>5} {judged:>7} {failed:>7} {seconds:>8}  {part.word}")
    return "\n".join(lines)
