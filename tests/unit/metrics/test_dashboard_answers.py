"""What is asked of Prometheus for a dashboard, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.answers import Span, answers, choices
from pdmux_ray.metrics.fake_prometheus import FakePrometheus

SPAN = Span(1000.0, 1900.0)
ROLES = [
    {"app": "a.1", "model": "demo", "role": "mux", "instance": "i2"},
    {"app": "a.1", "model": "demo", "role": "mux", "instance": "i1"},
]


def roles(expr: str, at_s: float) -> Iterable[tuple[Mapping[str, str], float]]:
    return [(labels, 1.0) for labels in ROLES] if "pdmux_role" in expr else []


def test_every_value_is_chosen_unless_one_is_given() -> None:
    source = FakePrometheus(roles)
    assert choices(source, DASHBOARDS["capacity"], {}, SPAN) == {
        "app": r"a\.1",
        "model": "demo",
        "role": "mux",
        "instance": "i1|i2",
    }
    assert choices(source, DASHBOARDS["capacity"], {"instance": "i2"}, SPAN)["instance"] == "i2"
    assert r'pdmux_role{app=~"a\\.1"}' in source.asked
    assert 'max_over_time(pdmux_role{app=~"a\\\\.1", model=~"demo", role=~"mux"}[900s]) == 1' in source.asked


def test_a_dashboard_of_one_instance_shows_the_first() -> None:
    assert choices(FakePrometheus(roles), DASHBOARDS["instance"], {}, SPAN)["instance"] == "i1"


def test_without_figures_it_says_what_to_look_at() -> None:
    with pytest.raises(ConfigError, match=r"no figures of app other.*/metrics/targets"):
        choices(FakePrometheus(lambda expr, at_s: []), DASHBOARDS["capacity"], {"app": "other"}, SPAN)


def test_every_query_of_every_panel_is_asked_with_nothing_left_open() -> None:
    for dashboard in DASHBOARDS.values():
        source = FakePrometheus(lambda expr, at_s: [({"instance": "i1", "reason": "room"}, at_s)])
        found = answers(source, dashboard, {"app": "a", "model": "m", "role": "mux", "instance": "i1"}, SPAN)
        assert len(source.asked) == sum(len(panel.queries) for panel in dashboard.panels)
        assert [expr for expr in source.asked if "$" in expr] == []
        assert all(len(curves) == len(panel.queries) for panel, curves in found.items())
    by_reason = next(curves for panel, curves in found.items() if panel.queries[0].legend == "{{instance}}")
    assert by_reason[0].name == "i1"
    assert by_reason[0].series.points[-1][1] == SPAN.end_s


def test_a_curve_has_as_many_points_as_a_picture_can_show() -> None:
    assert Span(0.0, 15_000.0).step_s == 100.0
    assert Span(0.0, 10.0).step_s == 1.0
