"""One panel of a dashboard: its figures as texts, and its picture as a Vega-Lite specification. Pure.

Times are seconds since the epoch, shown in UTC.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pdmux_ray.metrics.dashboards.answers import Curve
from pdmux_ray.metrics.dashboards.panel import BYTES_PER_S, SECONDS, SHARE, Form, Level, Panel, Unit
from pdmux_ray.report import figures
from pdmux_ray.report.marks import SECONDS as SECONDS_TEXT
from pdmux_ray.report.marks import Line, Spec, chart, colour, tooltips

MOST_CURVES = 8  # in one panel; more cannot be told apart
LEVELS = {
    Level.PLAIN: "var(--text)",
    Level.FINE: "var(--better)",
    Level.WARNING: "var(--warning)",
    Level.BAD: "var(--worse)",
}
_WORDS = {Level.PLAIN: "Plain", Level.FINE: "Fine", Level.WARNING: "A warning", Level.BAD: "Bad"}
_AXES: dict[Unit, Spec] = {
    SECONDS: {"labelExpr": SECONDS_TEXT},
    SHARE: {"format": "~%"},
    BYTES_PER_S: {"labelExpr": "format(datum.value, '~s') + 'B/s'", "tickMinStep": 1},
}
_ALIGNED: Spec = {"minExtent": 46, "maxExtent": 46}  # so that panels above each other begin at the same place
_COUNTS: Spec = {"labelExpr": "datum.value >= 1e4 ? format(datum.value, '~s') : format(datum.value, '~r')"}
_DASHED: Spec = {"condition": {"test": "datum.dashed", "value": [6, 4]}, "value": [1, 0]}
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)  # between two times
_MOST_TIMES = 6  # beneath a chart
_PREFIXES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def figure(value: float, unit: Unit) -> str:
    """With its unit, where that is a part of the figure: 25 ms, 98.5 %, 1.2 MB/s, 17."""
    if math.isnan(value):
        return figures.NONE
    if unit == SECONDS:
        return figures.duration(float(f"{value:.3g}"))
    if unit == SHARE:
        return figures.percent(value)
    if unit == BYTES_PER_S:
        size, name = next(((size, name) for size, name in _PREFIXES if abs(value) >= size), _PREFIXES[-1])
        return f"{value / size:.3g} {name}"
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if float(value).is_integer() else figures.significant(value)


def words(panel: Panel) -> str:
    """Its description, which may have Grafana's marks of code, and its thresholds."""
    return f"{panel.description.replace('`', '')} {limits(panel)}".rstrip()


def limits(panel: Panel) -> str:
    """The thresholds in words; nothing without any."""
    if not panel.thresholds.steps:
        return ""
    begins = ", ".join(f"{_WORDS[level].lower()} from {figure(value, panel.unit)}" for value, level in panel.thresholds.steps)
    return f"{_WORDS[panel.thresholds.base]} below {figure(panel.thresholds.steps[0][0], panel.unit)}, {begins}."


def chosen(curves: Sequence[Curve]) -> tuple[list[Curve], str]:
    """Those that a picture shows, in their order, and what is said of the others: that they are 0, or smaller."""
    known = [curve for curve in curves if any(math.isfinite(value) for _, value in curve.series.points)]
    moving = [curve for curve in known if any(value != 0 for _, value in curve.series.points)]
    resting = [curve.name for curve in known if curve not in moving] if moving else []
    shown = moving or known
    largest = sorted(shown, key=_mean, reverse=True)[:MOST_CURVES]
    notes = []
    if resting:
        notes.append(f"At 0 throughout: {figures.printable(', '.join(dict.fromkeys(resting)))}.")
    if len(largest) < len(shown):
        notes.append(f"{len(shown) - len(largest)} {'smaller ones' if moving else 'more at 0'} are left out.")
    return [curve for curve in shown if curve in largest], " ".join(notes)


def _mean(curve: Curve) -> float:
    values = [value for _, value in curve.series.points if math.isfinite(value)]
    return statistics.fmean(values) if values else 0.0


def over_time(
    panel: Panel, lines: Sequence[Line], curves: Sequence[Curve], span_s: tuple[float, float], *, legend: bool = False
) -> Spec:
    """`lines`: name and colour of each curve. `legend`: in the picture itself."""
    rows = [
        {"t": _ms(time_s), "series": line.name, "order": order, "v": _number(value), "dashed": curve.dashed}
        for order, (line, curve) in enumerate(zip(lines, curves, strict=True))
        for time_s, value in curve.series.points
    ]
    stacked = panel.form in (Form.STACK, Form.STEPS)
    top = _top(rows, stacked)
    if panel.thresholds.base is Level.BAD:  # what is to be reached is shown, too
        top = max(top, panel.thresholds.steps[-1][0] * 1.08)
    x: Spec = {"field": "t", "type": "quantitative", "scale": {"domain": [_ms(end) for end in span_s]}, "axis": _times(span_s)}
    axis = {"title": panel.unit.name or " ", "tickCount": 5, "grid": True, **_ALIGNED, **_AXES.get(panel.unit, _COUNTS)}
    if panel.form is Form.STEPS:
        axis["tickMinStep"] = 1  # there is no half of what is counted
    y: Spec = {"type": "quantitative", "scale": {"domain": [0, top]}, "axis": axis}
    tint = colour(lines)
    if legend and lines:
        tint["legend"] = {"orient": "bottom", "title": None, "columns": panel.columns // 2 - 1, "labelLimit": 170}
        tint["legend"]["symbolType"] = "square" if stacked else "stroke"
    encoding: Spec = {
        "x": x,
        "y": {"field": "v", **y, "stack": "zero" if stacked else None},
        "color": tint,
        "tooltip": [
            {"field": "at", "type": "nominal", "title": "time (UTC)"},
            *tooltips(("series", "series"), ("v", panel.unit.name or "value")),
        ],
    }
    encoding |= {"order": {"field": "order", "type": "quantitative"}} if stacked else {"strokeDash": _DASHED}
    in_utc = {"calculate": "utcFormat(datum.t, '%H:%M:%S')", "as": "at"}
    shown: Spec = {"data": {"values": rows}, "transform": [in_utc], "mark": _mark(panel, curves), "encoding": encoding}
    return chart([*_limit_rules(panel, top, y), shown])


def _ms(time_s: float) -> int:
    return round(time_s * 1e3)


def _times(span_s: tuple[float, float]) -> Spec:
    """An axis of times of day, at round ones."""
    begin_s, end_s = span_s
    step_s = next((step for step in _STEPS_S if (end_s - begin_s) / step <= _MOST_TIMES), _STEPS_S[-1])
    marks = range(math.ceil(begin_s / step_s), math.floor(end_s / step_s) + 1)
    form = "%H:%M:%S" if step_s < 60 else "%H:%M"
    return {"title": None, "values": [_ms(i * step_s) for i in marks], "labelExpr": f"utcFormat(datum.value, '{form}')"}


def _mark(panel: Panel, curves: Sequence[Curve]) -> Spec:
    if panel.form is Form.LINES:  # a curve of one point would be none
        return {"type": "line", "clip": True, "point": any(len(curve.series.points) < 3 for curve in curves)}
    shape = "step-after" if panel.form is Form.STEPS else "linear"
    return {"type": "area", "clip": True, "interpolate": shape, "fillOpacity": 0.5, "line": {"strokeWidth": 1}}


def _top(rows: Sequence[Spec], stacked: bool) -> float:
    """The end of the value axis."""
    heights: dict[int, float] = {}
    for row in rows:
        value = row["v"] or 0.0
        heights[row["t"]] = heights.get(row["t"], 0.0) + value if stacked else max(heights.get(row["t"], 0.0), value)
    return max(heights.values(), default=0.0) * 1.08 or 1.0


def _limit_rules(panel: Panel, top: float, y: Spec) -> list[Spec]:
    """Where the thresholds lie, as far as the axis goes, each in the colour of its worse side."""
    steps, badness = panel.thresholds.steps, list(Level).index
    levels = [panel.thresholds.base, *(level for _, level in steps)]
    return [
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "style": "limit", "color": LEVELS[max(levels[i : i + 2], key=badness)]},
            "encoding": {"y": {"datum": value, **y}},
        }
        for i, (value, _) in enumerate(steps)
        if value <= top
    ]


def _number(value: float) -> float | None:
    """None breaks a curve."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def figures_of(panel: Panel, named: Sequence[tuple[str, float]], width: int) -> Spec:
    """The newest values, side by side."""
    rows = [
        {
            "place": index,
            "name": f"{name}, {panel.unit.name}" if panel.unit.name and panel.unit.name != name else name,
            "figure": figure(value, panel.unit),
            "tint": LEVELS[panel.thresholds.of(value)],
        }
        for index, (name, value) in enumerate(named)
    ] or [{"place": 0, "name": "no data", "figure": figures.NONE, "tint": LEVELS[Level.PLAIN]}]

    def text(field: str, **mark: object) -> Spec:
        encoding: Spec = {
            "x": {"field": "place", "type": "ordinal", "axis": None},
            "text": {"field": field},
            "color": {"field": "tint", "type": "nominal", "scale": None} if field == "figure" else {"value": "var(--muted)"},
        }
        return {"mark": {"type": "text", **mark}, "encoding": encoding}

    layers = [text("figure", fontSize=26, fontWeight=600, dy=-6), text("name", fontSize=11, dy=18)]
    return {"data": {"values": rows}, "width": width, "height": 70, "layer": layers}
