"""Dashboards as pages, from made-up answers."""

from __future__ import annotations

import math
import re

import pytest

from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.answers import Curve, Span, answers
from pdmux_ray.metrics.dashboards.panel import (
    BYTES_PER_S,
    NO_LIMIT,
    SECONDS,
    SHARE,
    Dashboard,
    Form,
    Panel,
    Unit,
    bad_below,
    count,
    warns_from,
)
from pdmux_ray.metrics.fake_prometheus import FakePrometheus
from pdmux_ray.metrics.prometheus import Series
from pdmux_ray.report import board, panels
from pdmux_ray.report.marks import Line

SPAN = Span(1000.0, 1900.0)
CHOSEN = {"app": "a", "model": "m", "role": "mux", "instance": "i"}
LABELS = {name: f"{name}-1" for name in ("instance", "role", "tier", "reason", "owner", "kind", "lane", "stage")}
PLAIN = Panel("Title", "What it is.", count("pages"), NO_LIMIT, ())


def curve(name: str, *values: float) -> Curve:
    return Curve(name, Series({}, tuple((1000.0 + 10 * i, value) for i, value in enumerate(values))))


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("values", [1, 0])
def test_a_page_has_every_panel_with_and_without_data(dashboard: Dashboard, values: int) -> None:
    source = FakePrometheus(lambda expr, at_s: [(LABELS, 0.25 + math.sin(at_s))] * values)
    text = board.page(dashboard, answers(source, dashboard, CHOSEN, SPAN), SPAN, "of a test")
    headings = re.findall(r"<h3>(.*?)</h3>", text)
    assert {panel.title for panel in dashboard.panels} <= set(headings)
    assert text.count(board.NO_DATA) == (0 if values else len(dashboard.panels))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0254321, SECONDS, "25.4 ms"),
        (0.9996, SHARE, "99.9 %"),
        (1_230_000.0, BYTES_PER_S, "1.23 MB/s"),
        (0.0, BYTES_PER_S, "0 B/s"),
        (12345.0, count("pages"), "12,345"),
        (1.23456, count("tokens/s"), "1.23"),
        (math.nan, SECONDS, "–"),
    ],
)
def test_a_figure_has_its_unit(value: float, unit: Unit, text: str) -> None:
    assert panels.figure(value, unit) == text


def test_thresholds_are_said_in_words() -> None:
    limited = Panel("Title", "What.", SHARE, warns_from(0.02, bad=0.05), ())
    assert panels.limits(limited) == "Fine below 2 %, a warning from 2 %, bad from 5 %."
    assert panels.limits(PLAIN) == ""


def test_curves_that_rest_or_are_too_many_are_said_to_be_left_out() -> None:
    many = [curve(f"c{i}", 0.0, float(i)) for i in range(12)]
    shown, note = panels.chosen(many)
    assert [each.name for each in shown] == [f"c{i}" for i in range(4, 12)]
    assert note == "At 0 throughout: c0. 3 smaller ones are left out."
    assert panels.chosen([curve("a", 0.0), curve("b", 0.0)])[0] != []


def test_a_value_that_is_no_number_breaks_the_curve() -> None:
    spec = panels.over_time(PLAIN, [Line("a", "red")], [curve("a", 1.0, math.nan, 3.0)], (1000.0, 1020.0))
    assert [row["v"] for row in spec["layer"][-1]["data"]["values"]] == [1.0, None, 3.0]


def test_a_threshold_is_drawn_as_far_as_the_axis_goes_in_the_colour_of_its_worse_side() -> None:
    limited = Panel("Title", "What.", SHARE, warns_from(0.02, bad=0.5), ())
    spec = panels.over_time(limited, [Line("a", "red")], [curve("a", 0.01, 0.1)], (1000.0, 1010.0))
    rules = [layer for layer in spec["layer"] if layer["mark"]["type"] == "rule"]
    assert [(rule["encoding"]["y"]["datum"], rule["mark"]["color"]) for rule in rules] == [(0.02, "var(--warning)")]


def test_what_is_to_be_reached_is_on_the_axis_however_far() -> None:
    wanted = Panel("Title", "What.", SHARE, bad_below(0.9), ())
    spec = panels.over_time(wanted, [Line("a", "red")], [curve("a", 0.1, 0.2)], (1000.0, 1010.0))
    assert [layer["encoding"]["y"]["datum"] for layer in spec["layer"] if layer["mark"]["type"] == "rule"] == [0.9]


def test_a_stack_is_as_high_as_its_parts_together() -> None:
    stack = Panel("Title", "What.", count("pages"), NO_LIMIT, (), Form.STACK)
    lines = [Line("a", "red"), Line("b", "blue")]
    spec = panels.over_time(stack, lines, [curve("a", 3.0), curve("b", 2.0)], (1000.0, 1010.0))
    assert spec["layer"][-1]["encoding"]["y"]["scale"]["domain"][1] >= 5.0
