"""Questions to a server that answers as Prometheus' API documentation has it."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.prometheus import MAX_BYTES, Prometheus, PrometheusError, Series

ANSWERS: dict[str, dict[str, Any]] = {
    "up": {"resultType": "vector", "result": [{"metric": {"instance": "a"}, "value": [5.0, "1"]}]},
    "scalar(up)": {"resultType": "scalar", "result": [5.0, "NaN"]},
    "range": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1.0, "2.5"], [2.0, "+Inf"]]}]},
}


NONSENSE = {
    "no JSON": b"<html>",
    "another JSON": b"[]",
    "without data": b'{"status": "success"}',
    "a vector of nothing": b'{"data": {"resultType": "vector", "result": null}}',
    "a series without a value": b'{"data": {"resultType": "vector", "result": [{"metric": {}}]}}',
    "a value that is no number": b'{"data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "much"]}]}}',
    "nested without end": b"[" * 200_000,
    "too long": b" " * (MAX_BYTES + 1),
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        (query,) = asked["query"]
        if query in NONSENSE:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(NONSENSE[query])
            return
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


@pytest.mark.parametrize("answer", NONSENSE)
def test_an_answer_that_is_no_prometheus_says_so(prometheus: Prometheus, answer: str) -> None:
    with pytest.raises(PrometheusError, match="is it a Prometheus"):
        prometheus.query(answer)


def test_a_server_that_speaks_something_else_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def greet() -> None:
            line, _ = server.accept()
            with line:
                line.recv(65536)
                line.sendall(b"220 mail.example.org\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(PrometheusError, match="BadStatusLine"):
            Prometheus(f"http://127.0.0.1:{port}").query("up")
        thread.join()


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["in its head", "in its body"])
def test_a_server_that_answers_without_end_is_given_up(begin: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def trickle() -> None:
            line, _ = server.accept()
            with line, contextlib.suppress(OSError):  # until nobody reads
                line.sendall(begin)
                while True:
                    line.sendall(b"x")
                    time.sleep(0.01)

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(PrometheusError, match=r"no whole answer within 0.05 s"):
            Prometheus(f"http://127.0.0.1:{port}", timeout_s=0.05).query("up")
        thread.join()


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(PrometheusError, match=r"http://127.0.0.1:1 cannot be asked"):
        Prometheus("http://127.0.0.1:1").query("up")


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "file:///etc/passwd", ""])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        Prometheus(url)
