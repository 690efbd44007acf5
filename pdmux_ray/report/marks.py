"""What all charts are made of: colours, axes, series, tooltips, as parts of Vega-Lite specifications. Pure.

Colours are the names of page.css (`var(--…)`), so that a chart follows the page from light to dark by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

HEIGHT = 260
SERIES = tuple(f"var(--series-{i})" for i in range(8))
RANKS = tuple(f"var(--rank-{i})" for i in range(12))
SECONDS = "datum.value >= 1 ? format(datum.value, '~r') + ' s' : format(datum.value * 1000, '~r') + ' ms'"

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CONFIG: Spec = {
    "background": None,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelPadding": 5,
        "tickSize": 4,
        "labelOverlap": "greedy",
    },
    "axisY": {"domain": False, "ticks": False, "titleAlign": "left", "titleAngle": 0, "titleAnchor": "end", "titleY": -12},
    "axisX": {"grid": False},
    "text": {"fontSize": 11, "color": "var(--text)"},
    "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"},
    "style": {
        "limit": {"color": "var(--limit)", "strokeWidth": 1.5, "strokeDash": [5, 4]},
        "limit-label": {"color": "var(--limit)", "fontWeight": 600},
        "limit-band": {"color": "var(--limit)", "opacity": 0.15},
        "ideal": {"color": "var(--line)", "strokeWidth": 1.5, "strokeDash": [2, 4]},
        "rain": {"color": "var(--rain)"},
    },
}


def rank_colours(count: int) -> list[str]:
    """`count` colours in an order that is seen: for rates. At most len(RANKS) differ."""
    last = len(RANKS) - 1
    return [RANKS[round(i * last / max(1, count - 1))] if count > 1 else RANKS[last] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Line:
    """A series: its name and colour."""

    name: str
    colour: str


def log_domain(values: Iterable[float], limits: Iterable[float] = ()) -> tuple[float, float]:
    """Positive `values` with a margin. `limits` are shown, too, when they are less than a decade away."""
    found = [value for value in values if value > 0]
    low, high = (min(found), max(found)) if found else (0.01, 1.0)
    low, high = max(low, high * 1e-6), high
    near = [limit for limit in limits if low / 10 <= limit <= high * 10]
    return min([low, *near]) / 1.25, max([high, *near]) * 1.25


def log_ticks(domain_s: tuple[float, float]) -> list[float]:
    """1, 2, 5 times powers of ten within the domain; only the powers where it spans more than three decades."""
    low, high = domain_s
    steps = (1, 2, 5) if high / low < 1e3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{step}e{power}") for power in powers for step in steps if low <= float(f"{step}e{power}") <= high]


def log_scale(domain: tuple[float, float]) -> Spec:
    return {"type": "log", "domain": list(domain), "nice": False}


def seconds_axis(domain_s: tuple[float, float]) -> Spec:
    return {"values": log_ticks(domain_s), "labelExpr": SECONDS}


def colour(lines: Sequence[Line], field: str = "series") -> Spec:
    scale = {"domain": [line.name for line in lines], "range": [line.colour for line in lines]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


def tooltips(*names: tuple[str, str], form: str = ".3~r") -> list[Spec]:
    words = ("series", "cause", "lane")
    return [
        {"field": field, "title": title}
        | ({"type": "nominal"} if field in words else {"type": "quantitative", "format": form if field != "rate" else ".4~r"})
        for field, title in names
    ]


def chart(layers: list[Spec]) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }


def rounded(rows: Sequence[Spec]) -> list[Spec]:
    """Five significant digits: enough for any screen, and the page stays small."""
    return [{name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in row.items()} for row in rows]
