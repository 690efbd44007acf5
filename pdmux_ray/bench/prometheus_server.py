"""A Prometheus on loopback that scrapes one server and evaluates the project's rules: Debian's package `prometheus`."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from pdmux_ray.bench.server import free_port
from pdmux_ray.errors import ConfigError, PdmuxError

RULES = Path(__file__).parents[2] / "dashboards" / "rules.yaml"
READY_S = 30.0


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Again: does nothing."""
        self.process.terminate()
        self.process.wait(READY_S)


@contextlib.contextmanager
def scraping(app_url: str, port: int | None = None, every_s: float = 2.0, rules: Path = RULES) -> Iterator[PrometheusServer]:
    """Until the end, or `stop`. `app_url`: of the server, which tells its targets; it need not be up yet.

    Raises ConfigError when there is no Prometheus on this machine, PdmuxError when it does not start.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise ConfigError("there is no `prometheus` on this machine: install Debian's package of that name")
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(app_url, every_s, rules)), encoding="utf-8")
        command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with (Path(folder) / "log").open("wb") as log:
            started = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        server = PrometheusServer(f"http://127.0.0.1:{port}", started)
        try:
            _wait_until_ready(server, Path(folder) / "log")
            yield server
        finally:
            server.stop()


def configuration(app_url: str, every_s: float, rules: Path = RULES) -> dict[str, object]:
    """Rules are evaluated as often as their groups say."""
    found = {"url": f"{app_url.rstrip('/')}/metrics/targets", "refresh_interval": "2s"}
    period = f"{round(every_s * 1000)}ms"
    return {
        "global": {"scrape_interval": period, "scrape_timeout": period, "evaluation_interval": period},
        "rule_files": [str(rules.absolute())],
        "scrape_configs": [{"job_name": "pdmux", "http_sd_configs": [found]}],
    }


def _wait_until_ready(server: PrometheusServer, log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and server.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=1):
            return
        time.sleep(0.1)
    raise PdmuxError(f"Prometheus did not start; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")
