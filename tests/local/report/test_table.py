from __future__ import annotations

import io
import re

from rich.console import Console

from pdmux_ray.report import figures
from pdmux_ray.report.ratios import MEASURES
from pdmux_ray.report.table import print_comparison, print_runs
from tests.unit.report.samples import target

HOSTILE = "[red]x[/red] \x1b[2J\r\u202e" + "long " * 40


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_where_there_is_no_terminal_every_run_is_one_line_of_the_same_columns() -> None:
    console = plain()
    print_runs(console, [target("A").summary, target(HOSTILE).summary])
    lines = [line.split() for line in text(console).splitlines()]
    (first, second) = [line for line in lines if line[:1] == ["target"]]
    assert first == second
    runs = [line for line in lines if line[0] in ("A", "[red]x[/red]")]
    assert [line[-12] for line in runs if line[0] == "A"] == ["2", "4", "8"]
    assert len(runs) == 6


def test_names_are_neither_markup_nor_control_characters() -> None:
    for console in (plain(), terminal(200)):
        print_runs(console, [target(HOSTILE).summary])
        print_comparison(console, [("A", target("A").summary), (HOSTILE, target(HOSTILE).summary)])
        assert "[red]x[/red]" in text(console)
        assert not set("\r\u202e") & set(text(console))
        assert "\x1b[2J" not in text(console)


def test_a_file_gets_no_colours() -> None:
    console = plain()
    print_comparison(console, [("A", target("A").summary), ("B", target("B", tokens=40).summary)])
    assert "\x1b" not in text(console)
    assert "goodput" in text(console)


def test_a_narrow_terminal_loses_no_figure() -> None:
    wide, narrow = terminal(200), terminal(80)
    for console in (wide, narrow):
        print_runs(console, [target("A").summary])
    for figure in ("requests", "errors", figures.ms(target("A").summary.runs[2].e2e_s.p50)):
        assert figure in text(wide)
        assert figure in text(narrow)
    assert "…" not in text(narrow)
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text(narrow)).splitlines()) <= 80


def test_an_invalid_run_is_called_so_with_its_reason() -> None:
    console = plain()
    print_runs(console, [target("A", invalid=(8,), why="the client sent late").summary])
    assert "INVALID at 8 requests/s: the client sent late" in text(console)


def test_goodput_stands_below_with_its_terms() -> None:
    console = plain()
    print_runs(console, [target("A", rates=(2,)).summary])
    (line,) = [line for line in text(console).splitlines() if line.startswith("goodput")]
    assert line.startswith("goodput: at least 2.00 requests/s, 95 % interval")
    assert line.endswith("90 % of requests with TTFT ≤ 500 ms and p99 of the request's ITLs ≤ 50 ms")


def test_an_unknown_goodput_has_neither_unit_nor_interval() -> None:
    console = plain()
    print_runs(console, [target("A", rates=(2,), invalid=(2,)).summary])
    (line,) = [line for line in text(console).splitlines() if line.startswith("goodput")]
    assert line.startswith("goodput: unknown (there is no valid run at an offered rate); 90 %")


def test_a_comparison_has_a_row_for_each_measure_and_rate_with_what_is_better() -> None:
    console = plain()
    print_comparison(console, [("A", target("A").summary), ("B", target("B", tokens=20).summary)])
    rows = [line.split() for line in text(console).splitlines()][1:]
    assert len(rows) == 1 + len(MEASURES) * 3
    assert all(row[-1] in ("better", "worse", "even", "unclear") for row in rows)
