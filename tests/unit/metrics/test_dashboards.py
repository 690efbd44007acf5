"""What every dashboard keeps to, and that the committed files are those that the code makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray import cli
from pdmux_ray.metrics.catalog import CATALOG
from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.grafana import document
from pdmux_ray.metrics.dashboards.panel import COLUMNS, Dashboard, Level, Panel, Thresholds, bad_below, warns_from
from pdmux_ray.metrics.dashboards.variables import VARIABLES, filled
from pdmux_ray.metrics.metric import Kind
from pdmux_ray.metrics.rules import rules

COMMITTED = Path(__file__).parents[3] / "dashboards"
OF_PROMETHEUS = {"up", "ALERTS"}
OF_TARGETS = {"app", "model", "instance", "component"}
RULES: dict[str, str] = {
    rule["record"]: rule["expr"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule
}
PANELS = [(dashboard, panel) for dashboard in DASHBOARDS.values() for panel in dashboard.panels]
of_every_panel = pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=lambda v: getattr(v, "title", None))
of_every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=lambda d: d.name)


def asked(expr: str) -> set[str]:
    """The metrics and rules that are in it."""
    return set(re.findall(r"[\w:]*pdmux_[\w:]+", expr)) | (set(re.findall(r"\w+", expr)) & OF_PROMETHEUS)


def metrics(expr: str) -> Iterator[str]:
    """Those of the catalog, through rules."""
    for name in asked(expr):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if name in RULES:
            yield from metrics(RULES[name])
        elif base in CATALOG and CATALOG[base].kind is Kind.HISTOGRAM:
            yield base
        elif name not in OF_PROMETHEUS:
            yield name


@of_every_panel
def test_a_panel_asks_for_what_there_is(dashboard: Dashboard, panel: Panel) -> None:
    assert [name for query in panel.queries for name in metrics(query.expr) if name not in CATALOG] == []


def test_what_is_important_is_on_a_dashboard() -> None:
    shown = {name for _, panel in PANELS for query in panel.queries for name in metrics(query.expr)}
    assert {name for name, metric in CATALOG.items() if metric.important} - shown == set()


@of_every_panel
def test_a_panel_names_its_series_by_labels_that_they_have(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        known = {label for name in metrics(query.expr) for label in CATALOG[name].labels} | OF_TARGETS
        if any(name.startswith("role:") for name in asked(query.expr)):
            known.add("role")  # which the rule takes from pdmux_role
        used = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) | set(re.findall(r"(\w+)=~?\"", query.expr)) - {"alertstate"}
        assert used - known == set(), query


@of_every_panel
def test_a_panel_says_what_it_shows_in_which_unit_and_from_when_it_is_bad(dashboard: Dashboard, panel: Panel) -> None:
    assert panel.title
    assert panel.description.endswith(".")
    assert panel.unit.grafana
    assert panel.thresholds.base in Level
    assert [value for value, _ in panel.thresholds.steps] == sorted({value for value, _ in panel.thresholds.steps})


@of_every_dashboard
def test_titles_of_panels_differ(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert sorted(titles) == sorted(set(titles))


@of_every_dashboard
def test_a_dashboard_goes_by_every_choice_that_it_offers(dashboard: Dashboard) -> None:
    text = " ".join([query.expr for panel in dashboard.panels for query in panel.queries])
    offered = [entry["name"] for entry in document(dashboard)["templating"]["list"]]
    assert offered == ["datasource", "app", "model", "role", "instance"]
    narrowed = " ".join(variable.series for variable in VARIABLES)
    assert [name for name in offered[1:] if f"${name}" not in text + narrowed] == []


@of_every_dashboard
def test_no_panel_lies_over_another_or_beside_the_grid(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    panels = document(dashboard)["panels"]
    for place in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < COLUMNS
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_each_dashboard_has_an_address_of_its_own() -> None:
    assert len({document(dashboard)["uid"] for dashboard in DASHBOARDS.values()}) == 5


@of_every_dashboard
def test_grafana_asks_what_the_panels_ask(dashboard: Dashboard) -> None:
    drawn: list[dict[str, Any]] = [panel for panel in document(dashboard)["panels"] if panel["type"] != "row"]
    assert [[t["expr"] for t in panel["targets"]] for panel in drawn] == [
        [query.expr for query in panel.queries] for panel in dashboard.panels
    ]
    for panel in drawn:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"]


def test_the_committed_files_are_those_that_the_code_makes() -> None:
    assert cli.main(["dashboards", "--check", "--out", str(COMMITTED)]) == 0
    assert {path.name for path in COMMITTED.iterdir()} == {
        *(f"{name}.json" for name in DASHBOARDS),
        "rules.yaml",
        "prometheusrule.yaml",
    }


def test_a_file_that_was_changed_or_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboards", "--out", str(tmp_path)]) == 0
    assert cli.main(["dashboards", "--check", "--out", str(tmp_path)]) == 0
    changed = json.loads((tmp_path / "capacity.json").read_text()) | {"title": "mine"}
    (tmp_path / "capacity.json").write_text(json.dumps(changed))
    (tmp_path / "rules.yaml").unlink()
    capsys.readouterr()
    assert cli.main(["dashboards", "--check", "--out", str(tmp_path)]) == 1
    assert "capacity.json, rules.yaml in" in capsys.readouterr().out


def test_a_value_is_at_the_level_of_the_last_threshold_that_it_reaches() -> None:
    assert [warns_from(1, bad=3).of(value) for value in (0.9, 1, 3)] == [Level.FINE, Level.WARNING, Level.BAD]
    assert [bad_below(0.9, fine=0.99).of(value) for value in (0.5, 0.9, 1)] == [Level.BAD, Level.WARNING, Level.FINE]
    assert Thresholds(Level.PLAIN).of(7) is Level.PLAIN


def test_a_choice_is_written_as_a_promql_string_has_it() -> None:
    assert filled('up{app=~"$app"}', {"app": r'a\.b"'}) == r'up{app=~"a\\.b\""}'
