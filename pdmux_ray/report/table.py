"""Tables for the terminal, and for a file or a pipe: there plain, each row one line, without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdmux_ray.metrics.summary import RunSummary, Stats, Summary
from pdmux_ray.report import figures
from pdmux_ray.report.ratios import Verdict, compare, ratio_text, rows

_STYLES = {Verdict.BETTER: "green", Verdict.WORSE: "red"}
_RUN_COLUMNS = (
    *("rate/s", "requests", "errors", "good", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"),
    *("TPOT p50 ms", "e2e p50 ms", "tokens /s"),
)
_PLAIN_WIDTH = 10_000  # characters: no row of a table is broken in a file


def print_runs(console: Console, summaries: Sequence[Summary]) -> None:
    """A table per target, and its goodput below."""
    for summary in summaries:
        target = summary.runs[0].target if summary.runs else "no runs"
        table = _table(console, ("target", *_RUN_COLUMNS) if not console.is_terminal else _RUN_COLUMNS)
        if console.is_terminal:
            console.print(_text(target, "bold"))
        for run in summary.runs:
            cells = run_cells(run)
            style = "red" if run.invalid else ""
            table.add_row(*(_text(cell, style) for cell in (cells if console.is_terminal else [run.target, *cells])))
        _print(console, table)
        for run in summary.runs:
            if run.invalid:
                _line(console, f"INVALID at {figures.rate(run.rate)} requests/s: {run.invalid}", "bold red")
        _line(console, f"goodput: {goodput_line(summary)}", "bold")


def goodput_line(summary: Summary) -> str:
    figure = f"{figures.goodput(summary)} {figures.goodput_unit(summary)}".strip()
    found = ", ".join(part for part in (figure, figures.goodput_interval(summary)) if part)
    terms = f"{figures.percent(summary.attainment)} of requests with {figures.slo(summary.slo)}"
    return f"{found} ({figures.goodput_meaning(summary)}); {terms}"


def run_cells(run: RunSummary) -> list[str]:
    """The texts of one row, in the order of the columns."""
    return [
        *(figures.rate(run.rate), f"{run.requests:,}", f"{run.errors:,}", figures.percent(run.good_fraction)),
        *(figures.ms(value) for stats in (run.ttft_s, run.itl_s) for value in _ends(stats)),
        *(figures.ms(run.tpot_s.p50), figures.ms(run.e2e_s.p50), figures.significant(run.output_tokens_per_s)),
    ]


def _ends(stats: Stats) -> tuple[float | None, float | None]:
    return stats.p50, stats.p99


def print_comparison(console: Console, targets: Sequence[tuple[str, Summary]]) -> None:
    """Of at least two targets, the first being the baseline: one row per measure and rate, ratios to the baseline."""
    baseline, *others = (name for name, _ in targets)
    columns = ["rate/s", "measure", baseline]
    for name in others:
        columns += [name, "ratio", ""]
    table = _table(console, columns, left=range(1, len(columns)))
    for row in rows(compare(targets), len(others)):
        cells = [_text(figures.NONE if row[0].rate is None else figures.rate(row[0].rate)), _text(row[0].measure)]
        cells.append(_text(row[0].baseline_text))
        for found in row:
            cells += [
                _text(found.text),
                _text(ratio_text(found)),
                _text(found.verdict.value, _STYLES.get(found.verdict, "dim")),
            ]
        table.add_row(*cells)
    _print(console, table)


def print_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> None:
    """A table of texts. `left`: columns of words."""
    table = _table(console, columns, left)
    for cells in rows:
        table.add_row(*map(_text, cells))
    _print(console, table)


def _table(console: Console, columns: Iterable[str], left: Sequence[int] = ()) -> Table:
    roomy = console.is_terminal and console.width >= 96
    table = Table(box=box.SIMPLE_HEAD if roomy else None, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        heading = name.replace(" ", "\n", 1) if console.is_terminal and index not in left else name
        at_left = index in left or name == "target"
        table.add_column(_text(heading, lines=True), justify="left" if at_left else "right", overflow="fold", vertical="bottom")
    return table


def _print(console: Console, table: Table) -> None:
    if console.is_terminal:
        console.print(table)
    else:
        Console(file=console.file, width=_PLAIN_WIDTH, color_system=None).print(table)


def print_line(console: Console, text: str) -> None:
    """One line, however long: a path in it can be copied."""
    console.print(_text(text), soft_wrap=True)


def _line(console: Console, text: str, style: str) -> None:
    console.print(_text(text, style), soft_wrap=not console.is_terminal)


def _text(text: str, style: str = "", lines: bool = False) -> Text:
    """Never markup: names and errors come from servers. `lines`: it may have several."""
    parts = text.split("\n") if lines else [text]
    return Text("\n".join(map(figures.printable, parts)), style=style)
