"""The picture of `bench.placement`: what became of requests by when they came, above the roles of the instances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pdmux_ray.bench.placement_fleet import Outcome
from pdmux_ray.metrics.goodput import Verdict
from pdmux_ray.report.marks import Line, Spec, chart, colour, rounded, tooltips
from pdmux_ray.report.page import Chart, Key, Section, Table, render

BIN_S = 5.0  # of arrivals
ROLES = (Line("decode", "var(--series-0)"), Line("prefill", "var(--series-1)"))
ENDS = (Line("good", "var(--series-2)"), Line("late or slow", "var(--series-3)"), Line("failed", "var(--limit)"))


def page(outcomes: Sequence[Outcome], turn_s: float, tables: Sequence[Table], lead: str) -> str:
    """HTML, one file without network. `turn_s`: when the load turns."""
    first = Section("Figures", list(tables))
    return render("Placement under a load that turns", [first, *(_section(each, turn_s) for each in outcomes)], lead)


def _section(outcome: Outcome, turn_s: float) -> Section:
    span_s = max(life.due_s for life in outcome.lifelines) - outcome.begin_s
    charts = [requests_chart(outcome, turn_s, span_s)]
    if outcome.roles:
        charts.append(roles_chart(outcome, turn_s, span_s))
    return Section(outcome.setting.name, charts)


def requests_chart(outcome: Outcome, turn_s: float, span_s: float) -> Chart:
    """Requests by when they came."""
    counts = Counter(
        (math.floor((life.due_s - outcome.begin_s) / BIN_S), _end(verdict))
        for life, verdict in zip(outcome.lifelines, outcome.verdicts, strict=True)
    )
    rows = [{"t": at * BIN_S, "to": (at + 1) * BIN_S, "cause": end, "n": count} for (at, end), count in sorted(counts.items())]
    encoding: Spec = {
        "x": {"field": "t", "bin": "binned", **_time(span_s)},
        "x2": {"field": "to"},
        "y": {"field": "n", "type": "quantitative", "stack": "zero", "axis": {"title": f"requests in {BIN_S:g} s"}},
        "color": colour(ENDS, "cause"),
        "tooltip": tooltips(("t", "from, s"), ("cause", "what became of them"), ("n", "requests")),
    }
    bars: Spec = {"data": {"values": rounded(rows)}, "mark": {"type": "bar"}, "encoding": encoding}
    title = f"{outcome.setting.name}: requests by when they came"
    words = f"{outcome.good} of {len(outcome.lifelines)} were good, {outcome.failed} failed."
    return Chart(chart([bars, _turn(turn_s, span_s)]), title, words, [Key.of(line, "box") for line in ENDS], words)


def roles_chart(outcome: Outcome, turn_s: float, span_s: float) -> Chart:
    """Instances by role."""
    rows = [
        {"t": sample.time_s, "cause": line.name, "n": count}
        for sample in outcome.roles
        for line, count in zip(ROLES, (sample.others, sample.prefill), strict=True)
        if 0 <= sample.time_s <= span_s
    ]
    encoding: Spec = {
        "x": {"field": "t", **_time(span_s)},
        "y": {"field": "n", "type": "quantitative", "stack": "zero", "axis": {"title": "instances", "tickMinStep": 1}},
        "color": colour(ROLES, "cause"),
        "tooltip": tooltips(("t", "s into the run"), ("cause", "role"), ("n", "instances")),
    }
    area: Spec = {"type": "area", "interpolate": "step-after", "fillOpacity": 0.45}
    layer: Spec = {"data": {"values": rounded(rows)}, "mark": area, "encoding": encoding}
    title = f"{outcome.setting.name}: instances by role"
    words = "Changes of the ratio: " + (", ".join(f"{at:.0f} s" for at in outcome.flips()) or "none") + "."
    return Chart(chart([layer, _turn(turn_s, span_s)]), title, words, [Key.of(line, "box") for line in ROLES], words)


def _end(verdict: Verdict) -> str:
    if verdict is Verdict.GOOD:
        return ENDS[0].name
    return ENDS[2].name if verdict in (Verdict.ERROR, Verdict.TRUNCATED) else ENDS[1].name


def _time(span_s: float) -> Spec:
    scale: Spec = {"domain": [0, span_s], "nice": False}
    return {"type": "quantitative", "scale": scale, "axis": {"title": "seconds into the run", "tickCount": 8}}


def _turn(turn_s: float, span_s: float) -> Spec:
    """The moment at which the load turns."""
    x: Spec = {"field": "t", **_time(span_s)}
    return {"data": {"values": [{"t": turn_s}]}, "mark": {"type": "rule", "style": "limit"}, "encoding": {"x": x}}
