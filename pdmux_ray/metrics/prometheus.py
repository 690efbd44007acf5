"""Questions to a Prometheus server over its HTTP API. Blocking: an event loop asks in a thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmux_ray.errors import ConfigError, PdmuxError

ANSWER_S = 30.0
MAX_BYTES = 64 * 2**20  # of an answer

# What comes of an answer that is no Prometheus'. RecursionError: JSON that is nested without end.
_NONSENSE = (OSError, http.client.HTTPException, LookupError, TypeError, ValueError, RecursionError)


class PrometheusError(PdmuxError):
    """The server cannot be asked, or has refused a query."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one label set; `points` are (seconds since the epoch, value), ascending, at least one. A value may be NaN."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def value(self) -> float:
        """The newest."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server's address, such as http://127.0.0.1:9090. Raises ConfigError when it is not one.

    `timeout_s`: for a connection, and then for a whole answer, however it comes.
    """

    url: str
    timeout_s: float = ANSWER_S

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{self.url!r} is no address of a Prometheus server. Use one such as http://127.0.0.1:9090.")

    def query(self, expr: str, at_s: float | None = None) -> list[Series]:
        """What PromQL says at that time, by default now. A scalar is a series without labels. Raises PrometheusError."""
        return self._ask("query", {"query": expr} | ({} if at_s is None else {"time": at_s}))

    def query_range(self, expr: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """Every `step_s` from begin to end, where there is a value. Raises PrometheusError."""
        return self._ask("query_range", {"query": expr, "start": begin_s, "end": end_s, "step": step_s})

    def _ask(self, path: str, asked: Mapping[str, str | float]) -> list[Series]:
        begin_s = time.monotonic()
        try:
            status, answer = self._post(path, urllib.parse.urlencode(asked))
            if status == http.HTTPStatus.OK:
                return _series(answer)
        except _NONSENSE as error:
            late = time.monotonic() - begin_s >= self.timeout_s
            why = f"no whole answer within {self.timeout_s:g} s" if late else repr(error)
            raise PrometheusError(f"{self.url} cannot be asked ({why}): is it a Prometheus, and does it run?") from None
        raise PrometheusError(f"{self.url} refuses {asked['query']!r}: {_reason(status, answer)}")

    def _post(self, path: str, form: str) -> tuple[int, bytes]:
        """Status and body. A POST: queries may be long."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(parts.netloc, timeout=self.timeout_s)) as connection:
            connection.connect()
            # The socket's own limit is of a single read: who sends a byte a second would keep it for ever.
            end = threading.Timer(self.timeout_s, _shut, [connection.sock])
            end.start()
            try:
                headers = {"Content-Type": "application/x-www-form-urlencoded"}
                connection.request("POST", f"{parts.path.rstrip('/')}/api/v1/{path}", form, headers)
                answer = connection.getresponse()
                body = answer.read(MAX_BYTES + 1)
            finally:
                end.cancel()
        if len(body) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return answer.status, body


def _shut(line: socket.socket) -> None:
    """Ends whatever reads from it."""
    with contextlib.suppress(OSError):  # it has just ended
        line.shutdown(socket.SHUT_RDWR)


def _series(body: bytes) -> list[Series]:
    data = json.loads(body)["data"]
    if data["resultType"] == "scalar":
        return [Series({}, (_point(data["result"]),))]
    return [Series(dict(found["metric"]), _points(found)) for found in data["result"]]


def _points(found: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    points = found["values"] if "values" in found else [found["value"]]
    return tuple(map(_point, points))


def _point(found: Sequence[Any]) -> tuple[float, float]:
    return float(found[0]), float(found[1])  # the value is a text, because JSON has no NaN and no infinity


def _reason(status: int, answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except _NONSENSE:
        return f"HTTP {status}"
