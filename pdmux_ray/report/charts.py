"""The charts of load runs, as Vega-Lite specifications: plain dicts from pure functions, https://vega.github.io/vega-lite.

Names of targets are data, never expressions. Widths follow the container. Values are seconds, shares, requests a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdmux_ray.report import figures
from pdmux_ray.report.marks import HEIGHT, Line, Spec, chart, colour, log_scale, rounded, seconds_axis, tooltips
from pdmux_ray.report.series import GapBin, UnitsSample

RAIN_SHARE = 0.16  # of a chart's height, for the arrivals that hang from its top
_ALIGNED = {"minExtent": 58, "maxExtent": 58, "grid": True}  # so that charts of one run have the same time above each other


@dataclass(frozen=True, slots=True)
class AttainmentPoint:
    """The share of good requests of one series at one rate."""

    series: str
    rate: float
    good: float
    ci: tuple[float, float] | None
    valid: bool = True


@dataclass(frozen=True, slots=True)
class GoodputMark:
    series: str
    rps: float
    ci: tuple[float, float]


def attainment_over_rate(
    lines: Sequence[Line], points: Sequence[AttainmentPoint], attainment: float, goodputs: Sequence[GoodputMark]
) -> Spec:
    """The share of good requests over the offered rate; where it crosses the attainment lies the goodput."""
    x = _rate_axis(points)
    y: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "axis": {"format": ".0%", "title": "good requests", "tickCount": 5, "grid": True},
    }
    marks = [
        {"series": mark.series, "rate": mark.rps, "low": mark.ci[0], "high": mark.ci[1], "good": attainment}
        for mark in goodputs
    ]
    interval: Spec = {
        "data": {"values": rounded(marks)},
        "mark": {"type": "rule", "strokeWidth": 7, "opacity": 0.35, "strokeCap": "round", "clip": True},
        "encoding": {
            "x": {"field": "low", **x},
            "x2": {"field": "high"},
            "y": {"field": "good", **y},
            "color": colour(lines),
            "tooltip": tooltips(("series", "target"), ("rate", "goodput"), ("low", "from"), ("high", "to")),
        },
    }
    limit = [
        {"data": {"values": [{}]}, "mark": {"type": "rule", "style": "limit"}, "encoding": {"y": {"datum": attainment, **y}}},
        {
            "data": {"values": [{"text": f"attainment {figures.percent(attainment)}"}]},
            "mark": {"type": "text", "style": "limit-label", "align": "left", "baseline": "top", "dx": 6, "dy": 5},
            "encoding": {"x": {"value": 0}, "y": {"datum": attainment, **y}, "text": {"field": "text"}},
        },
    ]
    return chart([*limit, interval, *_measured(lines, _rows(points), x, y, "good", ".1%")])


def good_over_rate(lines: Sequence[Line], points: Sequence[AttainmentPoint]) -> Spec:
    """Good requests a second over offered ones; a perfect server stays on the dotted diagonal."""
    x = _rate_axis(points)
    rows = [row | {name: row[name] * row["rate"] for name in ("good", "low", "high") if name in row} for row in _rows(points)]
    top = max((point.rate for point in points), default=1.0)
    highest = 1.08 * max((row["high"] if "high" in row else row["good"] for row in rows), default=0.0) or top
    y: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, highest]},
        "axis": {"title": "good requests/s", "tickCount": 5, "grid": True},
    }
    end = min(top, highest)
    diagonal: Spec = {
        "data": {"values": [{"from": 0, "to": end}]},
        "mark": {"type": "rule", "style": "ideal"},
        "encoding": {
            "x": {"field": "from", **x},
            "x2": {"field": "to"},
            "y": {"field": "from", **y},
            "y2": {"field": "to"},
        },
    }
    return chart([diagonal, *_measured(lines, rounded(rows), x, y, "good", ".3~r")])


def _rate_axis(points: Iterable[AttainmentPoint]) -> Spec:
    top = max((point.rate for point in points), default=1.0)
    scale: Spec = {"domain": [0, top * 1.04], "nice": False}
    return {"type": "quantitative", "scale": scale, "axis": {"title": "offered requests/s", "tickCount": 6}}


def _rows(points: Iterable[AttainmentPoint]) -> list[Spec]:
    return [
        {"series": point.series, "rate": point.rate, "good": point.good, "valid": point.valid}
        | ({"low": point.ci[0], "high": point.ci[1]} if point.ci else {})
        for point in sorted(points, key=lambda point: point.rate)
    ]


def _measured(lines: Sequence[Line], rows: Sequence[Spec], x: Spec, y: Spec, field: str, form: str) -> list[Spec]:
    """Line, interval and point of each valid measurement; a cross for an invalid one."""
    names = (("series", "target"), ("rate", "offered requests/s"), (field, "good"), ("low", "from"), ("high", "to"))
    encoding: Spec = {
        "x": {"field": "rate", **x},
        "y": {"field": field, **y},
        "color": colour(lines),
        "tooltip": tooltips(*names, form=form),
    }
    valid = {"values": [row for row in rows if row["valid"]]}
    bar: Spec = {**encoding, "y": {"field": "low", **y}, "y2": {"field": "high"}}
    found: list[Spec] = [
        {"data": valid, "mark": {"type": "line"}, "encoding": encoding},
        {"data": {"values": [row for row in valid["values"] if "low" in row]}, "mark": {"type": "rule"}, "encoding": bar},
        {"data": valid, "mark": {"type": "point", "filled": True, "opacity": 1, "size": 55}, "encoding": encoding},
    ]
    if invalid := [row for row in rows if not row["valid"]]:
        cross = {"type": "point", "shape": "cross", "angle": 45, "size": 110, "filled": True, "opacity": 1}
        found.append({"data": {"values": invalid}, "mark": cross, "encoding": encoding})
    return found


@dataclass(frozen=True, slots=True)
class MissShare:
    """The share of the requests offered at one rate that missed for one cause."""

    rate: float
    cause: str
    share: float


def misses(causes: Sequence[Line], shares: Sequence[MissShare], rates: Sequence[float], top: float) -> Spec:
    """Stacked over `rates`; `top` is the end of the axis, so that several targets can share it."""
    order = {line.name: index for index, line in enumerate(causes)}
    rows = [
        {"rate": figures.rate(s.rate), "cause": s.cause, "share": s.share, "order": order[s.cause]} for s in shares if s.share
    ]
    labels = [figures.rate(rate) for rate in rates]
    scale: Spec = {"domain": [0, top or 1]}
    encoding: Spec = {
        "x": {"field": "rate", "type": "ordinal", "scale": {"domain": labels, "paddingInner": 0.3}, "axis": {"labelAngle": 0}},
        "y": {"field": "share", "type": "quantitative", "scale": scale, "axis": {"format": ".0%", "tickCount": 5}},
        "color": colour(causes, "cause"),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": tooltips(("rate", "offered requests/s"), ("cause", "cause"), ("share", "requests"), form=".1%"),
    }
    encoding["x"]["axis"]["title"] = "offered requests/s"
    encoding["y"]["axis"]["title"] = "requests that missed"
    return chart([{"data": {"values": rounded(rows)}, "mark": {"type": "bar"}, "encoding": encoding}])


def cdf(
    lines: Sequence[Line],
    curves: Sequence[Sequence[tuple[float, float]]],
    title: str,
    domain_s: tuple[float, float],
    limits_s: tuple[float, float] | None,
) -> Spec:
    """One curve of (seconds, share) a line, over a logarithmic axis. `limits_s`: the SLO, from the shortest to the longest
    prompt where it depends on that."""
    rows = [
        {"series": line.name, "s": max(value, domain_s[0]), "share": share}
        for line, curve in zip(lines, curves, strict=True)
        for value, share in curve
    ]
    x: Spec = {
        "type": "quantitative",
        "scale": log_scale(domain_s),
        "axis": {**seconds_axis(domain_s), "title": title, "grid": True},
    }
    y: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "axis": {"format": ".0%", "title": "share that is not longer", "tickCount": 5},
    }
    encoding: Spec = {
        "x": {"field": "s", **x},
        "y": {"field": "share", **y},
        "color": colour(lines),
        "tooltip": tooltips(("series", "series"), ("s", "seconds"), ("share", "share"), form=".4~r"),
    }
    curve_mark = {"type": "line", "interpolate": "step-after", "clip": True}
    limit = _vertical_limit(limits_s, x, domain_s) if limits_s else []
    return chart([*limit, {"data": {"values": rounded(rows)}, "mark": curve_mark, "encoding": encoding}])


def _vertical_limit(limits_s: tuple[float, float], x: Spec, domain_s: tuple[float, float]) -> list[Spec]:
    low, high = limits_s
    if not domain_s[0] <= low <= domain_s[1]:
        return []
    data: Spec = {"values": [{"low": low, "high": min(high, domain_s[1]), "text": _limit_text(limits_s)}]}
    at_right = math.log(low / domain_s[0]) > 0.6 * math.log(domain_s[1] / domain_s[0])
    label = {"align": "right", "dx": -6} if at_right else {"align": "left", "dx": 6}
    band: list[Spec] = [
        {
            "data": data,
            "mark": {"type": "rect", "style": "limit-band"},
            "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}},
        }
    ]
    edges: list[Spec] = [
        {"data": data, "mark": {"type": "rule", "style": "limit"}, "encoding": {"x": {"field": name, **x}}}
        for name in (("low", "high") if high > low else ("low",))
    ]
    text: Spec = {
        "data": data,
        "mark": {"type": "text", "style": "limit-label", "baseline": "bottom", "dy": -4, **label},
        "encoding": {"x": {"field": "low", **x}, "y": {"value": HEIGHT}, "text": {"field": "text"}},
    }
    return [*(band if high > low else []), *edges, text]


def _limit_text(limits_s: tuple[float, float]) -> str:
    low, high = limits_s
    return f"SLO {figures.duration(low)}" if low == high else "SLO, by prompt"


def itl_over_time(
    bins: Sequence[GapBin],
    rain: Sequence[tuple[float, int]],
    span_s: float,
    domain_s: tuple[float, float],
    limit_s: float | None,
) -> Spec:
    """p50, p99 and the longest gap of each stretch of a run, over a logarithmic axis; arriving prompts hang from the top."""
    low, high = domain_s
    raised = (low, low * (high / low) ** (1 / (1 - RAIN_SHARE)))  # room for the rain above all gaps
    x = _time_axis(span_s)
    y: Spec = {
        "type": "quantitative",
        "scale": log_scale(raised),
        "axis": {**seconds_axis(domain_s), **_ALIGNED, "title": "ITL"},
    }
    names = (("t", "s into the run"), ("p50", "p50, s"), ("p99", "p99, s"), ("max", "longest, s"))
    rows = [{"t": b.time_s, "p50": b.p50_s, "p99": b.p99_s, "max": b.max_s} for b in bins]

    def layer(field: str, **mark: Any) -> Spec:
        encoding = {"x": {"field": "t", **x}, "y": {"field": field, **y}, "tooltip": tooltips(*names, form=".3~r")}
        return {"mark": mark, "encoding": encoding}

    layers = [
        layer("max", type="point", filled=True, size=14, opacity=0.75, color="var(--muted)"),
        layer("p99", type="line", color="var(--series-1)"),
        layer("p50", type="line", color="var(--series-0)"),
    ]
    if limit_s is not None and low <= limit_s <= high:
        rule = {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "style": "limit"},
            "encoding": {"y": {"datum": limit_s, **y}},
        }
        label: Spec = {
            "data": {"values": [{"text": _limit_text((limit_s, limit_s))}]},
            "mark": {"type": "text", "style": "limit-label", "align": "left", "baseline": "bottom", "dx": 4, "dy": -4},
            "encoding": {"x": {"value": 0}, "y": {"datum": limit_s, **y}, "text": {"field": "text"}},
        }
        layers += [rule, label]
    return _rained(rows, layers, rain, x)


def units_over_time(steps: Sequence[UnitsSample], rain: Sequence[tuple[float, int]], span_s: float) -> Spec:
    """The units of each lane, stacked; prompts hang from the top as they arrive. At least one step."""
    lanes = LANES
    rows = [
        {"t": step.time_s, "lane": lane.name, "units": value, "order": order}
        for step in steps
        for order, (lane, value) in enumerate(zip(lanes, (step.decode_units, step.prefill_units), strict=True))
    ]
    x = _time_axis(span_s)
    top = max(step.prefill_units + step.decode_units for step in steps) / (1 - RAIN_SHARE) or 1
    encoding: Spec = {
        "x": {"field": "t", **x},
        "y": {
            "field": "units",
            "type": "quantitative",
            "stack": "zero",
            "scale": {"domain": [0, top], "nice": False},
            "axis": {"title": "units", "tickMinStep": 1, "tickCount": 6, **_ALIGNED},
        },
        "color": colour(lanes, "lane"),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": tooltips(("t", "s into the run"), ("lane", "lane"), ("units", "units"), form=".3~r"),
    }
    area: Spec = {"type": "area", "interpolate": "step-after", "fillOpacity": 0.45, "line": {"strokeWidth": 1.5}}
    return _rained(rows, [{"mark": area, "encoding": encoding}], rain, x)


LANES = (Line("decode", "var(--series-0)"), Line("prefill", "var(--series-1)"))


def _rained(rows: Sequence[Spec], layers: list[Spec], rain: Sequence[tuple[float, int]], x: Spec) -> Spec:
    """`layers` over `rows`, and prompts as bars that hang from the top."""
    tallest = max((tokens for _, tokens in rain), default=1) or 1
    scale: Spec = {"domain": [0, tallest / RAIN_SHARE * 1.15], "nice": False, "reverse": True}
    drops: Spec = {
        "data": {"values": rounded([{"t": time_s, "tokens": tokens} for time_s, tokens in rain])},
        "mark": {"type": "bar", "style": "rain", "width": 1.5},
        "encoding": {
            "x": {"field": "t", **x},
            "y": {"field": "tokens", "type": "quantitative", "scale": scale, "axis": None},
            "tooltip": tooltips(("t", "s into the run"), ("tokens", "prompt tokens"), form=",~r"),
        },
    }
    shown: Spec = {"data": {"values": rounded(rows)}, "layer": layers}
    return {**chart([drops, shown]), "resolve": {"scale": {"y": "independent"}}}


def _time_axis(span_s: float) -> Spec:
    scale: Spec = {"domain": [0, max(span_s, 1e-3)], "nice": False}
    return {"type": "quantitative", "scale": scale, "axis": {"title": "seconds into the run", "tickCount": 8}}
