"""The configuration with which deploy/ starts Prometheus."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pdmux_ray.bench.prometheus_server import tool

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def test_prometheus_takes_the_deployed_configuration_with_its_rules(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dashboards", tmp_path / "dashboards")
    (folder := tmp_path / "deploy/prometheus").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/prometheus/prometheus.yml", folder)
    (folder / "api_key").write_text("key")
    command = [tool("promtool"), "check", "config", str(folder / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
