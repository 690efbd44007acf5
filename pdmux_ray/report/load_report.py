"""The report of load runs: one page, of one target or of several that are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pdmux_ray.metrics.summary import RunSummary, Stats, write_whole
from pdmux_ray.report import figures, load_charts, ratios
from pdmux_ray.report.page import Alarm, Block, Card, Cards, Folded, Group, Key, Notes, Row, Section, Table, render
from pdmux_ray.report.ratios import Comparison, Verdict
from pdmux_ray.report.runs import TargetRuns, lines, with_names
from pdmux_ray.report.series import UnitsSample

__all__ = ["FILE_NAME", "TargetRuns", "UnitsSample", "build", "write_report"]

FILE_NAME = "report.html"
MAX_ERRORS = 10  # different ones that are listed
_STATS = tuple(field.name for field in fields(Stats))
_MARKS = {Verdict.BETTER: "better", Verdict.WORSE: "worse"}


def write_report(directory: Path, title: str, targets: Sequence[TargetRuns], notes: Sequence[str] = ()) -> Path:
    """Makes `directory/report.html`; see `build`."""
    return write_whole(directory / FILE_NAME, build(title, targets, notes))


def build(title: str, targets: Sequence[TargetRuns], notes: Sequence[str] = ()) -> str:
    """The page. `targets`: at least one, each with at least one run; the first is the baseline of a comparison. `notes`: what a
    reader must know beside the summaries' conditions, a paragraph each."""
    named = with_names(targets)
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    sections = [
        Section("", _alarms(named)),
        Section("", [_cards(named)]),
        Section("What was run", _conditions(named, notes)),
        Section("Comparison", _comparison(named), _comparison_intro(named)),
        Section("Goodput", load_charts.over_rate(named)),
        Section("Runs", [block for target in named for block in _run_tables(target)]),
        Section("Misses by cause", load_charts.misses(named), "The first cause that holds, in the order of the legend."),
        Section(
            "Latency", load_charts.latencies(named), "TTFT counts from the planned arrival; an ITL lies between two arrivals."
        ),
        Section("Over time", load_charts.over_time(named)),
        Section("Errors", _errors(named)),
    ]
    footer = f"Written {written} by pdmux-ray {version('pdmux-ray')}. This file needs no network and sends nothing."
    return render(figures.printable(title), sections, f"Load report, {written}", footer)


def _alarms(targets: Sequence[TargetRuns]) -> list[Block]:
    invalid = [
        f"{target.name}, {figures.rate(run.rate)} requests/s: {figures.printable(run.invalid)}"
        for target in targets
        for run, _ in target.runs
        if run.invalid
    ]
    if not invalid:
        return []
    one = len(invalid) == 1
    count = "1 run is invalid" if one else f"{len(invalid)} runs are invalid"
    return [Alarm(f"{count} and must not be used. No goodput counts {'it' if one else 'them'}.", invalid)]


def _cards(targets: Sequence[TargetRuns]) -> Cards:
    return Cards(
        [
            Card(
                f"Goodput of {target.name}",
                figures.goodput(target.summary),
                figures.goodput_unit(target.summary),
                [
                    line
                    for line in (figures.goodput_interval(target.summary), _sentence(figures.goodput_meaning(target.summary)))
                    if line
                ],
                Key(f"Goodput of {target.name}", line.colour, "box") if len(targets) > 1 else None,
            )
            for target, line in zip(targets, lines(targets), strict=True)
        ]
    )


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _conditions(targets: Sequence[TargetRuns], notes: Sequence[str]) -> list[Block]:
    """What is the same for all targets first, then the rest with a column per target."""
    facts = [_facts(target) for target in targets]
    names = list(dict.fromkeys(name for found in facts for name in found))
    same = [name for name in names if len({found.get(name) for found in facts}) == 1]
    rows = [Row([name, facts[0][name]]) for name in same]
    blocks: list[Block] = [Table("Asked of every target" if len(targets) > 1 else "Asked", ("", ""), rows, style="words asked")]
    if len(same) < len(names):
        rows = [Row([name, *(found.get(name, figures.NONE) for found in facts)]) for name in names if name not in same]
        columns = ("", *(target.name for target in targets))
        blocks.append(Table("Where the targets differ", columns, rows, style="words asked"))
    lines = [figures.printable(note) for note in dict.fromkeys(notes)]
    return [*blocks, *([Notes(lines)] if lines else [])]


def _facts(target: TargetRuns) -> dict[str, str]:
    summary = target.summary
    conditions = {figures.printable(k): figures.printable(v) for k, v in summary.conditions.items()}
    return conditions | {
        "SLO": figures.slo(summary.slo),
        "attainment": f"{figures.percent(summary.attainment)} of requests",
        "devices": str(summary.devices),
        "definition": summary.definition,
    }


def _comparison(targets: Sequence[TargetRuns]) -> list[Block]:
    """The goodput and the rate where the baseline's attainment still held in the open, the other rates folded."""
    compared = ratios.compare([(target.name, target.summary) for target in targets])
    if not compared:
        return []
    others = len(targets) - 1
    by_rate: dict[float | None, list[Sequence[Comparison]]] = {}
    for row in ratios.rows(compared, others):
        by_rate.setdefault(row[0].rate, []).append(row)
    held = targets[0].held
    opened = held.rps if held and held.rps in by_rate else next((rate for rate in by_rate if rate is not None), None)
    first = [*by_rate.pop(None), *(by_rate.pop(opened) if opened is not None else [])]
    caption = "Goodput" if opened is None else f"Goodput, and figures at {figures.rate(opened)} requests/s"
    blocks: list[Block] = [_ratios_table(caption, targets, first)]
    tables = [
        _ratios_table(f"At {figures.rate(rate)} requests/s", targets, rows)
        for rate, rows in by_rate.items()
        if rate is not None
    ]
    return [*blocks, *([Folded(f"At the other rates ({len(tables)})", tables)] if tables else [])]


def _comparison_intro(targets: Sequence[TargetRuns]) -> str:
    return (
        f"Each ratio is a target's figure over that of {targets[0].name}. A goodput is better or worse only where the 95 % "
        f"intervals do not meet, and never worse where it is a lower bound; any other figure is where it differs by more than "
        f"{figures.percent(ratios.EVEN)}."
    )


def _ratios_table(caption: str, targets: Sequence[TargetRuns], rows: Sequence[Sequence[Comparison]]) -> Table:
    groups = [Group("", 1), Group(targets[0].name, 1), *(Group(target.name, 3) for target in targets[1:])]
    columns = ["", "baseline", *(name for _ in targets[1:] for name in ("figure", "ratio", ""))]
    body = []
    for row in rows:
        cells = [row[0].measure, row[0].baseline_text]
        styles: dict[int, str] = {}
        for found in row:
            styles |= {len(cells) + i: _MARKS.get(found.verdict, "") for i in (1, 2)}
            cells += [found.text, ratios.ratio_text(found), found.verdict.value]
        body.append(Row(cells, styles=styles))
    return Table(caption, columns, body, groups, style="named")


def _run_tables(target: TargetRuns) -> list[Block]:
    """What most readers look for in the open; every statistic folded."""
    columns = ("requests/s", "requests", "errors", "good", "p50", "p99", "p50", "p99", "p50", "p99", "p50", "p99", "tokens/s")
    groups = [Group("", 4), *(Group(name, 2) for name in ("TTFT, ms", "ITL, ms", "TPOT, ms", "End to end, ms")), Group("", 1)]
    rows = [
        Row(
            [
                *_counts(run),
                *(figures.ms(value) for stats in _measures(run) for value in (stats.p50, stats.p99)),
                figures.significant(run.output_tokens_per_s),
            ],
            invalid=run.invalid is not None,
        )
        for run, _ in target.runs
    ]
    return [Table(target.name, columns, rows, groups), Folded(f"All figures of {target.name}", [_full_table(target)])]


def _full_table(target: TargetRuns) -> Table:
    names = ("TTFT, ms", "ITL, ms", "TPOT, ms", "End to end, ms", "Sent late, ms")
    columns = ("requests/s", "requests", "errors", "good", *(_STATS * len(names)), "prompt", "output", "seconds")
    groups = [Group("", 4), *(Group(name, len(_STATS)) for name in names), Group("Tokens", 2), Group("", 1)]
    rows = [
        Row(
            [
                *_counts(run),
                *(figures.ms(getattr(stats, name)) for stats in (*_measures(run), run.send_lag_s) for name in _STATS),
                *(f"{run.prompt_tokens:,}", f"{run.output_tokens:,}", figures.significant(run.duration_s)),
            ],
            invalid=run.invalid is not None,
        )
        for run, _ in target.runs
    ]
    return Table(f"All figures of {target.name}", columns, rows, groups)


def _counts(run: RunSummary) -> list[str]:
    rate = figures.rate(run.rate) + (" INVALID" if run.invalid else "")
    return [rate, f"{run.requests:,}", f"{run.errors:,}", figures.percent(run.good_fraction)]


def _measures(run: RunSummary) -> tuple[Stats, ...]:
    return run.ttft_s, run.itl_s, run.tpot_s, run.e2e_s


def _errors(targets: Sequence[TargetRuns]) -> list[Block]:
    """What servers and connections said, the most frequent first."""
    said = Counter(
        (target.name, figures.printable(lifeline.error))
        for target in targets
        for _, lifelines in target.runs
        for lifeline in lifelines
        if lifeline.error
    )
    if not said:
        return []
    rows = [Row([name, f"{count:,}", error]) for (name, error), count in said.most_common(MAX_ERRORS)]
    more = len(said) - len(rows)
    caption = f"What requests failed with{f' ({more} rarer ones are left out)' if more > 0 else ''}"
    return [Table(caption, ("target", "requests", "error"), rows, style="words errors")]
