"""What a dashboard is made of, whoever draws it: Grafana, or `pdmux dashboards --render`. Plain data, no drawing.

Queries are PromQL with the names of `variables` in them ($app, $instance, …) and Grafana's $__rate_interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

COLUMNS = 24  # of a dashboard's grid


class Form(Enum):
    """How the series of a panel are shown."""

    LINES = "lines"  # over time
    STACK = "stack"  # over time, as areas whose heights add up
    STEPS = "steps"  # a stack of values that hold until the next one: how many there are of what
    FIGURES = "figures"  # the newest value of each


@dataclass(frozen=True, slots=True)
class Unit:
    """`grafana`: its name there. `name`: the words on an axis, where the figures alone do not say it."""

    grafana: str
    name: str = ""


SECONDS = Unit("s")
SHARE = Unit("percentunit")  # 0 to 1
BYTES_PER_S = Unit("Bps")
REQUESTS_PER_S = Unit("reqps", "requests/s")


def count(name: str) -> Unit:
    """Of things that are counted: "pages", "tokens/s"."""
    return Unit("short", name)


class Level(Enum):
    """How good a value is."""

    PLAIN = "plain"  # no value is better than another
    FINE = "fine"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From which value on a series is at which level: `base` below the first of `steps`, which ascend."""

    base: Level
    steps: tuple[tuple[float, Level], ...] = ()

    def of(self, value: float) -> Level:
        return next((level for begin, level in reversed(self.steps) if value >= begin), self.base)


NO_LIMIT = Thresholds(Level.PLAIN)


def warns_from(value: float, bad: float | None = None) -> Thresholds:
    """More is worse: a warning from `value` on, bad from `bad` on."""
    return Thresholds(Level.FINE, ((value, Level.WARNING), *([(bad, Level.BAD)] if bad is not None else [])))


def bad_from(value: float) -> Thresholds:
    """More is worse, without a warning."""
    return Thresholds(Level.FINE, ((value, Level.BAD),))


def bad_below(value: float, fine: float | None = None) -> Thresholds:
    """Less is worse: bad below `value`, a warning up to `fine`."""
    if fine is None:
        return Thresholds(Level.BAD, ((value, Level.FINE),))
    return Thresholds(Level.BAD, ((value, Level.WARNING), (fine, Level.FINE)))


@dataclass(frozen=True, slots=True)
class Query:
    """`legend`: the name of a series, with its labels in it: "{{reason}}". `dashed`: an objective or a prediction."""

    expr: str
    legend: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. All of its queries have the same unit and thresholds; `title`: no other of its dashboard has it."""

    title: str
    description: str
    unit: Unit
    thresholds: Thresholds
    queries: tuple[Query, ...]
    form: Form = Form.LINES
    columns: int = 8  # of COLUMNS


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, side by side as far as they fit."""

    title: str
    panels: tuple[Panel, ...]

    def lines(self) -> Iterator[Sequence[Panel]]:
        """As they stand beside each other."""
        line: list[Panel] = []
        for panel in self.panels:
            if sum(other.columns for other in (*line, panel)) > COLUMNS:
                yield line
                line = []
            line.append(panel)
        yield line


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name`: of its file. `question`: the one that it answers. `one_instance`: it shows one at a time."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]
    one_instance: bool = False

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]
