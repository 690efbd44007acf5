"""The chart of a tuner's search, as a Vega-Lite specification: goodput over the share of the GPUs that only prefill. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.report.marks import Line, Spec, chart, colour, rounded, tooltips


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """The best candidate of one series at one ratio."""

    series: str
    share: float  # of the GPUs, 0 to 1
    rps: float  # goodput a GPU; of one that holds no rate that was tried the lowest of them
    ci: tuple[float, float] | None  # None: only an upper limit is known
    name: str  # of the candidate


def goodput_over_ratio(lines: Sequence[Line], points: Sequence[RatioPoint]) -> Spec:
    """A line a series, with intervals; what is only known to be less is a triangle that points down."""
    top = 1.08 * max((point.ci[1] if point.ci else point.rps for point in points), default=1.0) or 1.0
    x: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, 1], "nice": False},
        "axis": {"format": ".0%", "title": "GPUs that only prefill", "tickCount": 8},
    }
    y: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"title": "goodput, requests/s per GPU", "tickCount": 5, "grid": True},
    }
    names = (("name", "candidate"), ("share", "only prefill"), ("rps", "goodput per GPU"), ("low", "from"), ("high", "to"))
    encoding: Spec = {
        "x": {"field": "share", **x},
        "y": {"field": "rps", **y},
        "color": colour(lines),
        "tooltip": [{"field": "name", "title": "candidate", "type": "nominal"}, *tooltips(*names[1:])],
    }
    known = {"values": rounded([_row(point) for point in points if point.ci])}
    less = {"values": rounded([_row(point) for point in points if not point.ci])}
    bar: Spec = {**encoding, "y": {"field": "low", **y}, "y2": {"field": "high"}}
    return chart(
        [
            {"data": known, "mark": {"type": "line"}, "encoding": encoding},
            {"data": known, "mark": {"type": "rule"}, "encoding": bar},
            {"data": known, "mark": {"type": "point", "filled": True, "opacity": 1, "size": 55}, "encoding": encoding},
            {
                "data": less,
                "mark": {"type": "point", "shape": "triangle-down", "filled": True, "opacity": 0.7, "size": 60},
                "encoding": encoding,
            },
        ]
    )


def _row(point: RatioPoint) -> Spec:
    low, high = point.ci or (0.0, point.rps)
    return {"series": point.series, "share": point.share, "rps": point.rps, "low": low, "high": high, "name": point.name}
