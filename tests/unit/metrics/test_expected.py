"""A tuner's expectations as thresholds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdmux_ray import cli
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards import DASHBOARDS
from pdmux_ray.metrics.dashboards.expected import Expected, expecting, read, text
from pdmux_ray.metrics.dashboards.panel import Level

EXPECTED = Expected("2P+6M", 40.0, 0.95, ttft_p99_s=0.3, itl_p99_s=0.02, ttft_limit_s=0.5, itl_limit_s=0.05)


def test_every_panel_that_is_given_thresholds_is_there() -> None:
    titles = {panel.title for dashboard in DASHBOARDS.values() for panel in dashboard.panels}
    assert set(EXPECTED.thresholds()) <= titles


def test_load_warns_before_the_goodput_and_is_bad_beyond_it() -> None:
    levels = EXPECTED.thresholds()["Offered requests"]
    assert [levels.of(rate) for rate in (35.0, 37.0, 41.0)] == [Level.FINE, Level.WARNING, Level.BAD]


def test_latencies_warn_beyond_what_is_expected_and_are_bad_beyond_the_objective() -> None:
    levels = EXPECTED.thresholds()["Time to first token"]
    assert [levels.of(seconds) for seconds in (0.2, 0.4, 0.6)] == [Level.FINE, Level.WARNING, Level.BAD]
    beyond = replace(EXPECTED, ttft_p99_s=0.7).thresholds()["Time to first token"]
    assert beyond.of(0.8) is Level.WARNING


def test_the_attainment_that_was_asked_for_is_the_limit() -> None:
    levels = EXPECTED.thresholds()["SLO attainment"]
    assert [levels.of(share) for share in (0.94, 0.96, 0.98)] == [Level.BAD, Level.WARNING, Level.FINE]


def test_without_expectations_nothing_changes() -> None:
    assert all(expecting(dashboard, None) == dashboard for dashboard in DASHBOARDS.values())


def test_the_dashboards_are_written_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "expected.json").write_text(text(EXPECTED))
    assert read(tmp_path / "expected.json") == EXPECTED
    arguments = ["dashboards", "--out", str(tmp_path / "d"), "--expected", str(tmp_path / "expected.json")]
    assert cli.main(arguments) == 0
    panels = json.loads((tmp_path / "d" / "slo_overview.json").read_text())["panels"]
    offered = next(panel for panel in panels if panel["title"] == "Offered requests")
    assert [step["value"] for step in offered["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [None, 36.0, 40.0]
    assert cli.main([*arguments, "--check"]) == 0
    assert cli.main([*arguments[:-2], "--check"]) == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text('{"goodput": 1}')
    with pytest.raises(ConfigError, match=r"expected\.json that `pdmux tune` wrote"):
        read(tmp_path / "e.json")
