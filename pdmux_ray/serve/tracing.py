"""What the HTTP front tells of a request to whoever traces it. Nobody does unless `gateway.tracing` says so: then
`serve.spans`, which is imported no earlier, makes OpenTelemetry spans.

    trace = tracer.begin(path, headers)         its response carries `trace.headers`
    trace.routed(choice)                        each time that an instance is chosen
    trace.ended(outcome, error, served)         once it is known; what is said again is passed over
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdmux_ray.config import TracingConfig
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.serve.generation import Choice

if TYPE_CHECKING:
    from pdmux_ray.metrics.gateway_metrics import Outcome

# W3C Trace Context, https://www.w3.org/TR/trace-context/: what a request may carry, each as often as its client sent it.
CONTEXT_HEADERS = ("traceparent", "tracestate")

Headers = Mapping[str, list[str]]


class Served(NamedTuple):
    """One choice of an answer, when it has closed."""

    choice: Choice
    lifeline: Lifeline  # on `time.monotonic`
    stages_s: Mapping[str, float]  # of its first token, in the order in which they came; they add up to its TTFT


class Trace(Protocol):
    """One HTTP request's. Owner: its handler."""

    @property
    def headers(self) -> Mapping[str, str]:
        """For its response."""

    def routed(self, choice: RouteChoice) -> None: ...

    def ended(self, outcome: Outcome, error: BaseException | None = None, served: Iterable[Served] = ()) -> None: ...


class Tracer(Protocol):
    """One gateway's. Everything returns at once, but `close`."""

    def begin(self, path: str, headers: Headers) -> Trace: ...

    def close(self) -> None:
        """Sends what is left, for some seconds at most."""


class Untraced:
    """Of every request while nobody traces: one object for all of them."""

    headers: Mapping[str, str] = {}

    def routed(self, choice: RouteChoice) -> None: ...

    def ended(self, outcome: Outcome, error: BaseException | None = None, served: Iterable[Served] = ()) -> None: ...


UNTRACED = Untraced()


class NoTracer:
    """A gateway's that nobody has asked to trace."""

    def begin(self, path: str, headers: Headers) -> Trace:
        return UNTRACED

    def close(self) -> None: ...


def open_tracer(config: TracingConfig | None, gateway_id: str, model: str) -> Tracer:
    """`model`: as clients call it. None: nobody traces. Who asks for it closes it."""
    if config is None:
        return NoTracer()
    from pdmux_ray.serve.spans import SpanTracer, exporting

    return SpanTracer(exporting(config, gateway_id), model)
