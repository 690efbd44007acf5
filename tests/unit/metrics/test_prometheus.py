"""Questions to a server that answers as Prometheus' API documentation has it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.prometheus import Prometheus, PrometheusError, Series

ANSWERS: dict[str, dict[str, Any]] = {
    "up": {"resultType": "vector", "result": [{"metric": {"instance": "a"}, "value": [5.0, "1"]}]},
    "scalar(up)": {"resultType": "scalar", "result": [5.0, "NaN"]},
    "range": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1.0, "2.5"], [2.0, "+Inf"]]}]},
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        (query,) = asked["query"]
        known = self.path in ("/api/v1/query", "/api/v1/query_range") and query in ANSWERS
        body = {"status": "success", "data": ANSWERS[query]} if known else {"status": "error", "error": f"parse error: {asked}"}
        self.send_response(200 if known else 400)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Prometheus(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
        thread.join()


def test_an_instant_query_gives_the_newest_values(prometheus: Prometheus) -> None:
    assert prometheus.query("up", 5.0) == [Series({"instance": "a"}, ((5.0, 1.0),))]
    (scalar,) = prometheus.query("scalar(up)")
    assert scalar.labels == {}
    assert math.isnan(scalar.value)


def test_a_range_query_gives_values_over_time(prometheus: Prometheus) -> None:
    assert prometheus.query_range("range", 1.0, 2.0, 1.0) == [Series({}, ((1.0, 2.5), (2.0, math.inf)))]


def test_a_query_that_is_refused_is_named_with_the_reason(prometheus: Prometheus) -> None:
    with pytest.raises(PrometheusError, match=r"refuses 'up{': parse error.*'time': .'7.0'"):
        prometheus.query("up{", 7.0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(PrometheusError, match=r"http://127.0.0.1:1 cannot be asked"):
        Prometheus("http://127.0.0.1:1").query("up")


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "file:///etc/passwd", ""])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        Prometheus(url)
