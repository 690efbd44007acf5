"""A dashboard's panels as one page, or as one picture, from what Prometheus has answered."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import vl_convert

from pdmux_ray.metrics.dashboards.answers import Curve, Span
from pdmux_ray.metrics.dashboards.panel import Dashboard, Form, Level, Panel
from pdmux_ray.report import figures, panels
from pdmux_ray.report.marks import CONFIG, SERIES, Line, Spec
from pdmux_ray.report.page import Block, Card, Cards, Chart, Grid, Key, Row, Section, Table, render

Answers = Mapping[Panel, Sequence[Curve]]

NO_DATA = "No data."
_STYLES = {Level.PLAIN: "", Level.FINE: "better", Level.WARNING: "warning", Level.BAD: "worse"}
_COLUMN_PX = 62  # of a picture
_PICTURE_HEIGHT = 190
_LETTER_PX = 6.2  # of a description in a picture
_BETWEEN_PX = 84  # of a picture's panels side by side: for the axis of the second
# Each panel has colours of its own.
_APART: Spec = {"resolve": {"scale": {"color": "independent"}, "legend": {"color": "independent"}}}


def page(dashboard: Dashboard, answers: Answers, span: Span, lead: str) -> str:
    """HTML, one file without network. `lead`: what it is of."""
    sections = [Section(row.title, list(_blocks(row.panels, answers, span))) for row in dashboard.rows]
    return render(f"pdmux-ray: {dashboard.title}", sections, f"{dashboard.question} {figures.printable(lead)}")


def _blocks(row: Sequence[Panel], answers: Answers, span: Span) -> Iterator[Block]:
    if cards := [card for panel in row if panel.form is Form.FIGURES for card in _cards(panel, answers[panel])]:
        yield Cards(cards)
    if charts := [_chart(panel, answers[panel], span) for panel in row if panel.form is not Form.FIGURES]:
        yield Grid(charts)


def _cards(panel: Panel, curves: Sequence[Curve]) -> list[Card]:
    if not curves:
        return [Card(panel.title, figures.NONE, "", [NO_DATA, panels.words(panel)])]
    return [
        Card(
            panel.title,
            panels.figure(curve.series.value, panel.unit),
            panel.unit.name,
            [figures.printable(curve.name), panels.words(panel)],
            style=_STYLES[panel.thresholds.of(curve.series.value)],
        )
        for curve in curves
    ]


def _chart(panel: Panel, curves: Sequence[Curve], span: Span) -> Chart:
    shown, note = panels.chosen(curves)
    named = _lines(shown)
    return Chart(
        panels.over_time(panel, named, shown, (span.begin_s, span.end_s)),
        panel.title,
        panel.description,
        [Key.of(line, "line" if panel.form is Form.LINES else "box") for line in named],
        " ".join(filter(None, (panels.words(panel), note if curves else NO_DATA))),
        Table(
            panel.title,
            ("", "newest"),
            [Row([line.name, panels.figure(c.series.value, panel.unit)]) for line, c in zip(named, shown, strict=True)],
        ),
    )


def _lines(shown: Sequence[Curve]) -> list[Line]:
    """Names as they are shown; two alike are told apart, because a colour goes by the name."""
    names = [figures.printable(curve.name) or "value" for curve in shown]
    unique = [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
    return [Line(name, SERIES[i % len(SERIES)]) for i, name in enumerate(unique)]


def picture(dashboard: Dashboard, answers: Answers, span: Span, lead: str) -> bytes:
    """A PNG of the same panels, on white."""
    lines = [line for row in dashboard.rows for line in row.lines()]
    parts = [_beside([_part(panel, answers[panel], span) for panel in line]) for line in lines]
    spec: Spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {
            "text": f"pdmux-ray: {dashboard.title}",
            "subtitle": [dashboard.question, figures.printable(lead)],
            "anchor": "start",
            "fontSize": 22,
            "subtitleFontSize": 13,
            "subtitleColor": "var(--muted)",
            "offset": 24,
        },
        "padding": 30,
        "background": "var(--card)",
        "spacing": 34,
        "vconcat": parts,
        **_APART,
    }
    plain = {name: value for name, value in CONFIG.items() if name != "background"}
    return vl_convert.vegalite_to_png(_coloured(spec), config=_coloured(plain), scale=1.5)


def _beside(line: list[Spec]) -> Spec:
    """Parts of a picture in one line, their titles at one height."""
    words = max(len(part["title"]["subtitle"]) for part in line)
    for part in line:
        part["title"]["subtitle"] += [" "] * (words - len(part["title"]["subtitle"]))
    return {"hconcat": line, "spacing": _BETWEEN_PX, "bounds": "flush", **_APART}


def _part(panel: Panel, curves: Sequence[Curve], span: Span) -> Spec:
    width = panel.columns * _COLUMN_PX - _BETWEEN_PX
    shown, note = panels.chosen(curves)
    words = " ".join(filter(None, (panels.words(panel), note if curves else NO_DATA)))
    title: Spec = {
        "text": panel.title,
        "subtitle": textwrap.wrap(words, int(width / _LETTER_PX)),
        "anchor": "start",
        "frame": "group",
        "fontSize": 14,
        "subtitleColor": "var(--muted)",
        "subtitleFontSize": 10.5,
        "offset": 24,
    }
    if panel.form is Form.FIGURES:
        named = [(figures.printable(curve.name), curve.series.value) for curve in curves]
        return panels.figures_of(panel, named, width) | {"title": title}
    layers = panels.over_time(panel, _lines(shown), shown, (span.begin_s, span.end_s), legend=True)["layer"]
    return {"width": width, "height": _PICTURE_HEIGHT, "layer": layers, "title": title}


def _coloured(document: Any) -> Any:
    """With the light colours of page.css instead of their names: no page is around a picture."""
    return json.loads(re.sub(r"var\(--([\w-]+)\)", lambda match: _light()[match[1]], json.dumps(document)))


@functools.cache
def _light() -> dict[str, str]:
    css = files("pdmux_ray.report").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+);", css.partition("@media")[0]))
