"""A request's spans, in the memory of OpenTelemetry's own exporter for tests."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import Response

from pdmux_ray.config import TracingConfig
from pdmux_ray.errors import InstanceUnavailableError, PdmuxError, RequestError
from pdmux_ray.metrics.gateway_metrics import Outcome
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.serve import http
from pdmux_ray.serve.generation import Choice
from pdmux_ray.serve.spans import SpanTrace, SpanTracer, provider_of
from pdmux_ray.serve.tracing import UNTRACED, Headers, Served, Trace, open_tracer
from tests.local.serve.test_http import Echo
from tests.unit.serve.fakes import LetterText

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES_S = {"gateway": 0.1, "queue": 0.2, "transfer": 0.0, "prefill": 0.3, "delivery": 0.05}


class Traced:
    """A tracer whose spans can be read."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        config = TracingConfig(endpoint="http://127.0.0.1:1/v1/traces", sample_ratio=sample_ratio)
        self.provider: TracerProvider = provider_of(config, "g")
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = SpanTracer(self.provider, "m")

    def begin(self, **headers: str) -> SpanTrace:
        return self.tracer.begin("/v1/completions", {name: [value] for name, value in headers.items()})

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """By name, of which none may come twice."""
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


def served(tokens: int, stages_s: dict[str, float] = STAGES_S, index: int = 0) -> Served:
    """A choice whose tokens came every 0.1 s, the first one when its stages were over."""
    choice, lifeline = Choice(index, LetterText(), 7, first_of_prompt=index == 0), Lifeline(due_s=time.monotonic())
    for number in range(tokens):
        choice.take(("r", 97))
        lifeline.tokens_arrived(lifeline.due_s + sum(stages_s.values()) + 0.1 * number)
    return Served(choice, lifeline, stages_s)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_the_stages_follow_each_other_up_to_the_first_token_and_decoding_goes_on_from_there() -> None:
    traced = Traced()
    traced.begin().ended(Outcome.COMPLETE, served=[served(5)])
    spans = traced.spans
    stages = [spans[name] for name in ("gateway", "queue", "prefill", "delivery", "decode")]
    assert [seconds(span) for span in stages] == pytest.approx([0.1, 0.2, 0.3, 0.05, 0.4], abs=1e-6)
    for before, after in pairwise(stages):
        assert after.start_time == pytest.approx(before.end_time, abs=1000)  # ns
    assert "transfer" not in spans  # it took no time


def test_every_span_of_a_request_is_a_child_of_its_callers() -> None:
    traced = Traced()
    trace = traced.begin(traceparent=PARENT, tracestate="vendor=x")
    trace.ended(Outcome.COMPLETE, served=[served(2)])
    spans = traced.spans
    request = spans.pop("POST /v1/completions")
    assert request.parent is not None
    assert format(request.parent.span_id, "016x") == PARENT.split("-")[2]
    assert {format(span.context.trace_id, "032x") for span in (request, *spans.values())} == {PARENT.split("-")[1]}
    assert {span.parent.span_id for span in spans.values() if span.parent} == {request.context.span_id}
    assert trace.headers["traceparent"].startswith(f"00-{PARENT.split('-')[1]}-{request.context.span_id:016x}-")
    assert trace.headers["tracestate"] == "vendor=x"


def test_the_response_names_the_trace_also_when_its_caller_has_none() -> None:
    traced = Traced()
    trace = traced.begin(traceparent="00-nonsense")
    trace.ended(Outcome.COMPLETE)
    (span,) = traced.spans.values()
    assert list(trace.headers) == ["traceparent"]
    assert trace.headers["traceparent"].startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-")


@pytest.mark.parametrize(("ratio", "flags", "told"), [(0.0, None, 0), (0.0, "01", 1), (1.0, "00", 0), (1.0, None, 1)])
def test_the_caller_decides_whether_a_request_is_traced_and_else_the_ratio(ratio: float, flags: str | None, told: int) -> None:
    traced = Traced(ratio)
    trace = traced.begin(**{"traceparent": PARENT[:-2] + flags} if flags else {})
    trace.ended(Outcome.COMPLETE, served=[served(1, {"queue": 0.0})])
    assert len(traced.spans) == told
    assert int(trace.headers["traceparent"].split("-")[3], 16) & 1 == told  # the flag "sampled"


def test_a_request_says_what_it_used_and_where_it_ran_but_no_text() -> None:
    traced = Traced()
    trace = traced.begin()
    for instance in ("one", "two"):  # the first one is lost
        trace.routed(RouteChoice(instance, RouteReason.REMOTE, ("p",)))
    trace.ended(Outcome.COMPLETE, served=[served(3), served(2, {}, index=1)])
    (request,) = (span for span in traced.exporter.get_finished_spans() if span.name.startswith("POST"))
    told = dict(request.attributes or {})
    assert told["gen_ai.request.model"] == "m"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (7, 5)  # one prompt, two choices
    assert [event.attributes["pdmux.instance"] for event in request.events if event.attributes] == ["one", "two"]
    assert "aaa" not in json.dumps([json.loads(span.to_json()) for span in traced.exporter.get_finished_spans()])


@pytest.mark.parametrize(
    ("outcome", "error", "status"),
    [(Outcome.FAILED, InstanceUnavailableError("It is gone."), "ERROR"), (Outcome.REFUSED, RequestError("No."), "UNSET")],
)
def test_a_failure_of_the_server_is_an_error_and_one_of_its_client_is_not(
    outcome: Outcome, error: PdmuxError, status: str
) -> None:
    traced = Traced()
    traced.begin().ended(outcome, error)
    (span,) = traced.spans.values()
    assert span.status.status_code.name == status
    assert dict(span.attributes or {})["error.type"] == type(error).__name__


def test_a_request_that_has_ended_does_not_end_again() -> None:
    traced = Traced()
    trace = traced.begin()
    trace.ended(Outcome.COMPLETE, served=[served(2)])
    trace.ended(Outcome.FAILED, RequestError("late"), [served(2)])
    assert traced.spans["POST /v1/completions"].status.status_code.name == "UNSET"


class TracedEcho(Echo):
    """Refuses every request."""

    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    async def chat(self, raw: bytes, trace: Trace) -> Response:
        if raw == b"wait":
            await asyncio.Event().wait()
        raise RequestError("No.")

    complete = chat

    def trace(self, path: str, headers: Headers) -> Trace:
        return self.traced.tracer.begin(path, headers)


async def test_a_refused_request_is_traced_and_its_response_names_the_trace() -> None:
    traced = Traced()
    transport = httpx.ASGITransport(http.build_http_app(TracedEcho(traced)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
        reply = await client.post("/v1/completions", content=b"{}", headers=headers)
    (span,) = traced.spans.values()
    assert reply.status_code == 400
    assert reply.headers["traceparent"].split("-")[1:3] == [PARENT.split("-")[1], f"{span.context.span_id:016x}"]
    assert reply.headers["tracestate"] == "a=1,b=2"


async def test_a_client_that_leaves_ends_its_trace() -> None:
    traced = Traced()
    transport = httpx.ASGITransport(http.build_http_app(TracedEcho(traced)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        asking = asyncio.create_task(client.post("/v1/completions", content=b"wait"))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    (span,) = traced.spans.values()
    assert dict(span.attributes or {})["pdmux.outcome"] == "disconnected"


def test_without_a_collector_nothing_is_traced_and_nothing_is_returned() -> None:
    tracer = open_tracer(None, "g", "m")
    trace: Any = tracer.begin("/v1/completions", {"traceparent": [PARENT]})
    assert trace is UNTRACED
    assert trace.headers == {}
