"""Dashboards that were drawn without Grafana, in a real browser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.answers import Span, answers
from pdmux_ray.metrics.fake_prometheus import FakePrometheus
from pdmux_ray.report import board

from .conftest import Reader

pytestmark = pytest.mark.browser

SPAN = Span(1_790_000_000.0, 1_790_001_800.0)
CHOSEN = {"app": "a", "model": "m", "role": "mux", "instance": "i"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize("width", [390, 1280])
def test_every_panel_is_drawn_and_nothing_runs_over_the_side(name: str, width: int, tmp_path: Path, reader: Reader) -> None:
    labels = dict.fromkeys(("instance", "role", "tier", "reason", "owner", "kind", "lane", "stage", "verdict"), HOSTILE)
    source = FakePrometheus(lambda expr, at_s: [(labels, 1 + math.sin(at_s / 100)), ({"reason": "other"}, 0.5)])
    dashboard = DASHBOARDS[name]
    path = tmp_path / f"{name}.html"
    path.write_text(board.page(dashboard, answers(source, dashboard, CHOSEN, SPAN), SPAN, HOSTILE))
    page = reader.open(path, width)
    marks = "g.mark-line path, g.mark-area path"
    drawn = page.eval_on_selector_all("figure", f"all => all.map(f => f.querySelectorAll('{marks}').length)")
    assert len(drawn) >= 12
    assert min(drawn) >= 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
