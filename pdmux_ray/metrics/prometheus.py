"""Questions to a Prometheus server over its HTTP API. Blocking: an event loop asks in a thread."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmux_ray.errors import ConfigError, PdmuxError

ANSWER_S = 10.0


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
    """A server's address, such as http://127.0.0.1:9090. Raises ConfigError when it is not one."""

    url: str
    timeout_s: float = ANSWER_S

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{self.url!r} is no address of a Prometheus server. Use one such as http://127.0.0.1:9090.")

    def query(self, expr: str, at_s: float | None = None) -> list[Series]:
        """What PromQL says at that time, by default now. A scalar is a series without labels. Raises PrometheusError."""
        data = self._ask("query", {"query": expr} | ({} if at_s is None else {"time": at_s}))
        if data["resultType"] == "scalar":
            return [Series({}, (_point(data["result"]),))]
        return [Series(found["metric"], (_point(found["value"]),)) for found in data["result"]]

    def query_range(self, expr: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        """Every `step_s` from begin to end, where there is a value. Raises PrometheusError."""
        data = self._ask("query_range", {"query": expr, "start": begin_s, "end": end_s, "step": step_s})
        return [Series(found["metric"], tuple(map(_point, found["values"]))) for found in data["result"]]

    def _ask(self, path: str, asked: Mapping[str, str | float]) -> dict[str, Any]:
        body = urllib.parse.urlencode(asked).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/api/v1/{path}", body)  # a POST: queries may be long
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return dict(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{self.url} refuses {asked['query']!r}: {_reason(error)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PrometheusError(f"{self.url} cannot be asked ({error}): is it a Prometheus, and does it run?") from None


def _point(found: Sequence[Any]) -> tuple[float, float]:
    return float(found[0]), float(found[1])  # the value is a text, because JSON has no NaN and no infinity


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
