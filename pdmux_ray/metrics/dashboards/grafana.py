"""A dashboard as the JSON that Grafana 11 and later import, through provisioning or by hand. Pure.

The format is Grafana's own dashboard model (schema version 39, which later versions migrate by themselves):
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from typing import Any

from pdmux_ray.metrics.dashboards.panel import COLUMNS, Dashboard, Form, Level, Panel, Thresholds
from pdmux_ray.metrics.dashboards.variables import VARIABLES, Variable

Json = dict[str, Any]

SCHEMA_VERSION = 39
TAG = "pdmux-ray"
HEIGHTS = {Form.FIGURES: 4}  # of a panel, in rows of the grid
HEIGHT = 8

_CLASSIC = 5  # a query that is written as text
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLOURS = {Level.PLAIN: "text", Level.FINE: "green", Level.WARNING: "orange", Level.BAD: "red"}


def text(dashboard: Dashboard) -> str:
    """The file, always the same for the same dashboard."""
    return json.dumps(document(dashboard), indent=1, ensure_ascii=False) + "\n"


def document(dashboard: Dashboard) -> Json:
    """What `text` writes."""
    return {
        "annotations": {"list": []},
        "description": dashboard.question,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in every panel
        "id": None,
        "links": [_link()],
        "panels": list(_panels(dashboard)),
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": [TAG],
        "templating": {"list": [_source_variable(), *(_variable(v, dashboard.one_instance) for v in VARIABLES)]},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": f"pdmux-ray: {dashboard.title}",
        "uid": f"pdmux-{dashboard.name.replace('_', '-')}",
        "version": 1,
        "weekStart": "",
    }


def _link() -> Json:
    """To the other dashboards, at the same time with the same choices."""
    return {
        "type": "dashboards",
        "title": TAG,
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _source_variable() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }


def _variable(variable: Variable, one_instance: bool) -> Json:
    several = not (one_instance and variable.name == "instance")
    query = f"query_result({variable.series})" if variable.computed else f"label_values({variable.series}, {variable.name})"
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": _SOURCE,
        "query": {"qryType": _CLASSIC, "query": query, "refId": f"variable-{variable.name}"},
        "regex": f'/[{{,]{variable.name}="([^"]*)"/' if variable.computed else "",
        "multi": several,
        "includeAll": several,
        **({"current": {"text": ["All"], "value": ["$__all"]}} if several else {}),
        "hide": 0,
        "options": [],
        "refresh": 2,  # also when the time range changes
        "skipUrlSync": False,
        "sort": 1,
    }


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    y = 0
    number = iter(range(1, 1000))
    for row in dashboard.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        yield {"type": "row", "id": next(number), "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for line in row.lines():
            height = max(HEIGHTS.get(panel.form, HEIGHT) for panel in line)
            for x, panel in zip(_lefts(line), line, strict=True):
                yield _panel(panel, next(number), {"h": height, "w": panel.columns, "x": x, "y": y})
            y += height


def _lefts(line: Sequence[Panel]) -> list[int]:
    return [sum(other.columns for other in line[:i]) for i in range(len(line))]


def _panel(panel: Panel, number: int, place: Json) -> Json:
    figures = panel.form is Form.FIGURES
    return {
        "type": "stat" if figures else "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": False,
                "range": True,
                "refId": letter,
            }
            for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": _dashes(panel)},
        "options": _FIGURES if figures else _OVER_TIME,
    }


def _field(panel: Panel) -> Json:
    field: Json = {
        "unit": panel.unit.grafana,
        "thresholds": _thresholds(panel.thresholds),
        "color": {"mode": "thresholds" if panel.form is Form.FIGURES else "palette-classic"},
        "mappings": [],
    }
    return field if panel.form is Form.FIGURES else field | {"min": 0, "custom": _drawing(panel)}


def _dashes(panel: Panel) -> list[Json]:
    """How the curves of dashed queries differ."""
    dashes = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}
    return [
        {"matcher": {"id": "byFrameRefID", "options": letter}, "properties": [dashes]}
        for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        if query.dashed
    ]


def _drawing(panel: Panel) -> Json:
    stacked = panel.form in (Form.STACK, Form.STEPS)
    return {
        "axisLabel": panel.unit.name,
        "drawStyle": "line",
        "fillOpacity": 40 if stacked else 0,
        "lineInterpolation": "stepAfter" if panel.form is Form.STEPS else "linear",
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds.steps else "off"},
    }


def _thresholds(thresholds: Thresholds) -> Json:
    steps = [(None, thresholds.base), *thresholds.steps]
    return {"mode": "absolute", "steps": [{"color": _COLOURS[level], "value": value} for value, level in steps]}


_FIGURES: Json = {
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "textMode": "auto",
}
_OVER_TIME: Json = {
    "legend": {"calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
