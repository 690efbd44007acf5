"""What stands between Serve and HAProxy."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.serve import modes

WRITTEN = """\
defaults
    mode http
    timeout client 3600s
frontend prometheus
    bind :7001
frontend http_frontend
    bind 127.0.0.1:8000
backend one
    timeout client 3600s
listen stats
  bind *:7000
"""
MENDED = """\
defaults
    mode http
    timeout client 3600s
    timeout http-request 30s
frontend prometheus
    bind 127.0.0.1:7001
frontend http_frontend
    http-request del-header x-request-id if { req.fhdr(x-request-id) -m reg [^!-~]|.{129} }
    bind 127.0.0.1:8000
backend one
    timeout client 3600s
listen stats
  bind 127.0.0.1:7000
"""


def test_the_configuration_is_mended_before_haproxy_reads_it(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(WRITTEN)
    script = Path(modes.__file__).with_name("haproxy_loopback.sh")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PDMUX_HAPROXY_BINARY": "echo",
        "RAY_SERVE_HAPROXY_STATS_PORT": "7000",
        "RAY_SERVE_HAPROXY_METRICS_PORT": "7001",
    }
    run = subprocess.run(["sh", script, "-f", config, "-x"], env=environment, capture_output=True, text=True, check=True)
    assert config.read_text() == MENDED
    assert run.stdout.split() == ["-f", str(config), "-x"]


def test_free_ports_are_those_that_nobody_has_and_no_connection_is_given() -> None:
    first = modes.free_ports(3)
    assert len(set(first)) == 3
    assert all(20_000 <= port < 30_000 for port in first)
    with socket.create_server(("127.0.0.1", first[0])):
        assert first[0] not in modes.free_ports(9_000)


def test_more_ports_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="free ports from 20000 to 29999"):
        modes.free_ports(10_001)
