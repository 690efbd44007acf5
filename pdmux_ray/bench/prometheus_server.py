"""A Prometheus on loopback that scrapes one application and evaluates the project's rules: Debian's package `prometheus`."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import yaml

from pdmux_ray.bench.server import free_port
from pdmux_ray.errors import ConfigError, PdmuxError

RULES = Path(__file__).parents[2] / "dashboards" / "rules.yaml"
READY_S = 30.0

Targets: TypeAlias = Mapping[str, Mapping[str, str]]  # address -> labels
NOBODY: Targets = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """One that runs. Who started it stops it."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Again: does nothing."""
        self.process.terminate()
        self.process.wait(READY_S)


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`. Raises ConfigError when this machine has none."""
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"there is no `{name}` on this machine: apt-get install --no-install-recommends prometheus")
    return path


@contextlib.contextmanager
def scraping(
    app_url: str, port: int | None = None, every_s: float = 2.0, others: Targets = NOBODY
) -> Iterator[PrometheusServer]:
    """Until the end, or `stop`. `app_url`: of the server, which tells its targets; it need not be up yet.

    Raises ConfigError when there is no Prometheus on this machine, PdmuxError when it does not start.
    """
    binary, port = tool("prometheus"), port or free_port()
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(app_url, every_s, others)), encoding="utf-8")
        command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with (Path(folder) / "log").open("wb") as log:
            started = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        server = PrometheusServer(f"http://127.0.0.1:{port}", started)
        try:
            _wait_until_ready(server, Path(folder) / "log")
            yield server
        finally:
            server.stop()


def configuration(app_url: str, every_s: float, others: Targets = NOBODY) -> dict[str, object]:
    """Rules are evaluated as often as their groups say."""
    found = {"url": f"{app_url.rstrip('/')}/metrics/targets", "refresh_interval": "2s"}
    period = f"{round(every_s * 1000)}ms"
    static = [{"targets": [address], "labels": dict(labels)} for address, labels in others.items()]
    return {
        "global": {"scrape_interval": period, "scrape_timeout": period, "evaluation_interval": period},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "pdmux", "http_sd_configs": [found]},
            {"job_name": "others", "static_configs": static},
        ],
    }


def _wait_until_ready(server: PrometheusServer, log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and server.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=1):
            return
        time.sleep(0.1)
    raise PdmuxError(f"Prometheus did not start; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")
