"""The picture of a timeline: the units of each lane over time under the arrivals, and how each mode was used."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pdmux_ray.metrics.lane_units import UnitsChange, means
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.metrics.predictions import Judged
from pdmux_ray.metrics.trace import DECODE, Slice, Trace, arrivals_of, slices_of, units_of
from pdmux_ray.report import charts, figures, series
from pdmux_ray.report.page import Block, Chart, Grid, Key, Notes, Row, Section, Table, render
from pdmux_ray.report.series import UnitsSample, Window

AT_ONCE = 2e-4  # of the window: charts write times with five digits, and two values at one time would add up

_RAIN = Key("prompts as they arrive, height by tokens", "var(--rain)", "box")


def build(title: str, trace: Trace, footer: str = "") -> str:
    """The page, with every instance in the trace."""
    told = trace["otherData"]
    sections = [Section(figures.printable(f"Instance {name}"), _instance(trace, name)) for name in told["instances"]]
    if told["missing"] or not sections:
        lines = [figures.printable(f"{name}: {why}.") for name, why in told["missing"].items()]
        sections.append(Section("Not in this picture", [Notes(lines or ["No instance was linked."])]))
    return render(figures.printable(title), sections, "", footer)


def _instance(trace: Trace, name: str) -> list[Block]:
    changes = units_of(trace, name)
    if not changes:
        return [Notes(["It did nothing in this time."])]
    window = Window(changes[0].at_s, changes[-1].at_s)
    samples = samples_of(changes, window)
    arrivals = [Lifeline(at_s, prompt_tokens=tokens) for at_s, tokens in arrivals_of(trace, name)]
    rain = series.arrivals([a for a in arrivals if window.begin_s <= a.due_s <= window.end_s], window)
    units = Chart(
        charts.units_over_time(series.units(samples, window), rain, window.span_s),
        "Units per lane",
        "Compute units of the prefill lane and of the decode lane over time, stacked, with the arrivals of prompts.",
        [*(Key.of(lane, "box") for lane in reversed(charts.LANES)), _RAIN],
        " ".join(_notes(changes, samples, trace["otherData"]["instances"][name]["units"], window)),
    )
    return [Grid([units]), _uses(slices_of(trace, name), window.span_s)]


def _notes(changes: Sequence[UnitsChange], samples: Sequence[UnitsSample], units: float, window: Window) -> Iterator[str]:
    if len(samples) == series.UNIT_STEPS < len(changes):
        yield f"Each point is the mean of {figures.duration(float(f'{window.span_s / len(samples):.2g}'))}."
    if any(change.prefill_units + change.decode_units > units for change in changes):
        yield f"Where both lanes have more than the device's {units:g} units together, they share some."


def samples_of(changes: Sequence[UnitsChange], window: Window, run: int = 0) -> list[UnitsSample]:
    """What a chart can show of them within the window: as they are, but for what comes and goes at once, or means over time."""
    inside: list[UnitsChange] = []
    for change in changes:
        if not window.begin_s <= change.at_s <= window.end_s:
            continue
        if inside and change.at_s - inside[-1].at_s < AT_ONCE * window.span_s:
            inside[-1] = change._replace(at_s=inside[-1].at_s)
        else:
            inside.append(change)
    if len(inside) > series.UNIT_STEPS:
        inside = means(changes, window.begin_s, window.end_s, series.UNIT_STEPS)
    return [UnitsSample(change.at_s, change.prefill_units, change.decode_units, run) for change in inside]


def _uses(slices: Sequence[Slice], span_s: float) -> Table:
    """A row for each lane, mode and reason."""
    groups: dict[tuple[int, str, str], list[Slice]] = {}
    for each in slices:
        groups.setdefault((each.lane, each.mode, each.why), []).append(each)
    rows = [
        Row([figures.printable(f"{'decode' if lane == DECODE else 'prefill'}, {mode}, {why}"), *_figures(group, span_s)])
        for (lane, mode, why), group in sorted(groups.items())
    ]
    columns = ("lane, mode, reason", "launches", "of the time", "median ms", "median error", "over the 99 % bound")
    return Table("What the lanes did", columns, rows)


def _figures(slices: Sequence[Slice], span_s: float) -> list[str]:
    took_s = [each.took_s for each in slices]
    judged = Judged.of((each.predicted_s, each.bound_s, each.took_s) for each in slices)
    return [
        f"{len(slices):,}",
        figures.percent(min(1.0, sum(took_s) / span_s)) if span_s else figures.NONE,
        figures.ms(statistics.median(took_s)),
        figures.percent(judged.median_error) if judged else figures.NONE,
        figures.percent(judged.over_share) if judged else figures.NONE,
    ]
