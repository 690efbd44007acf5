"""A Prometheus server of the system's own, on loopback, that scrapes what an application lists."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from pdmux_ray.bench.server import free_port
from pdmux_ray.metrics.prometheus import Prometheus, PrometheusError

RULES = Path(__file__).parents[2] / "dashboards" / "rules.yaml"
SCRAPE_S = 0.5
START_S = 30.0


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"These tests run {name}, which is not installed: apt-get install --no-install-recommends prometheus")
    return path


@contextlib.contextmanager
def running(
    targets_url: str, folder: Path, key: str | None = None, others: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Prometheus]:
    """Until the context ends; with the committed rules. `folder`: an empty one, for its files. `key`: of the application.
    `others`: more addresses, with their labels."""
    allowed = {"authorization": {"credentials": key}} if key else {}
    discovery = {"url": targets_url, "refresh_interval": "1s"} | allowed
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_S * 1e3:g}ms",
            "scrape_timeout": f"{SCRAPE_S * 1e3:g}ms",
            "evaluation_interval": "1s",
        },
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "pdmux", "http_sd_configs": [discovery]} | allowed,
            {
                "job_name": "others",
                "static_configs": [{"targets": [at], "labels": dict(to)} for at, to in (others or {}).items()],
            },
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            _wait(prometheus, process, folder / "log")
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            prometheus.query("1")
        except PrometheusError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        else:
            return
