"""What a Prometheus server answers to the queries of a dashboard: what Grafana would draw."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards.panel import Dashboard, Panel
from pdmux_ray.metrics.dashboards.variables import VARIABLES, filled
from pdmux_ray.metrics.prometheus import Series

POINTS = 150  # of a curve, at most
WINDOW_S = 60.0  # of rates; Grafana's for a scrape every 15 s


class Source(Protocol):
    """What is asked: a `Prometheus`."""

    def query(self, expr: str, at_s: float | None = None) -> list[Series]: ...

    def query_range(self, expr: str, begin_s: float, end_s: float, step_s: float) -> list[Series]: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """A series by the name in the legend."""

    name: str
    series: Series
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the epoch. `window_s`: what a rate is over, at least four scrapes."""

    begin_s: float
    end_s: float
    window_s: float = WINDOW_S

    @property
    def step_s(self) -> float:
        return max(1.0, (self.end_s - self.begin_s) / POINTS)

    @property
    def values(self) -> dict[str, str]:
        """Of Grafana's own names in queries."""
        return {"__rate_interval": f"{self.window_s:g}s", "__range": f"{max(1, round(self.end_s - self.begin_s))}s"}


def choices(source: Source, dashboard: Dashboard, given: Mapping[str, str], span: Span) -> dict[str, str]:
    """A regular expression for each variable: what is given, else every value; of a dashboard of one instance the first.

    Raises ConfigError when there is no value at all, PrometheusError.
    """
    chosen: dict[str, str] = {}
    for variable in VARIABLES:
        if variable.name in given:
            chosen[variable.name] = given[variable.name]
            continue
        series = source.query(filled(variable.series, chosen | span.values), span.end_s)
        found = sorted({each.labels[variable.name] for each in series if variable.name in each.labels})
        if not found:
            text = ", ".join(f"{name} {value}" for name, value in chosen.items()) or "any application"
            raise ConfigError(
                f"There are no figures of {text} at that time, so there is no {variable.name}. Does the server scrape what "
                "/metrics/targets of the application lists?"
            )
        if dashboard.one_instance and variable.name == "instance":
            del found[1:]
        chosen[variable.name] = "|".join(map(re.escape, found))
    return chosen


def answers(source: Source, dashboard: Dashboard, chosen: Mapping[str, str], span: Span) -> dict[Panel, list[Curve]]:
    """The curves of every panel, in the order of its queries; none where there is no data. Raises PrometheusError."""
    values = {**chosen, **span.values}
    return {
        panel: [
            Curve(_name(query.legend, series.labels), series, query.dashed)
            for query in panel.queries
            for series in source.query_range(filled(query.expr, values), span.begin_s, span.end_s, span.step_s)
        ]
        for panel in dashboard.panels
    }


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
