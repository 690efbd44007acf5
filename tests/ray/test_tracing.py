"""Requests of a running application, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pdmux_ray.config import TracingConfig
from tests.ray.test_disaggregated import CONFIG, PAGE_WORDS, Pair
from tests.ray.test_disaggregated import pytestmark as pytestmark  # Ray, and NIXL
from tests.ray.test_operation import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP on loopback, and keeps every span."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of(self, trace_id: str) -> dict[str, Span]:
        """By name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.server.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def traced(served: str, collector: Collector) -> Iterator[Pair]:
    """An instance that prefills and one that decodes; the gateway tells the collector of every request."""
    from ray import serve

    from pdmux_ray.serve.app import build_app

    tracing = TracingConfig(endpoint=collector.url, service_name="test")
    config = CONFIG.model_copy(update={"gateway": CONFIG.gateway.model_copy(update={"tracing": tracing})})
    serve.run(build_app(config), name="traced", route_prefix="/traced")
    pair = Pair(f"{served}/traced", "traced")
    wait_until(pair.joined, 60)
    yield pair
    serve.delete("traced")


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_arrives_as_a_span_with_its_stages_in_the_trace_of_its_client(traced: Pair, collector: Collector) -> None:
    body = {"model": "demo", "prompt": " word" * PAGE_WORDS, "max_tokens": 12, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
    reply = httpx.post(f"{traced.url}/v1/completions", json=body, headers=headers, timeout=30)
    wait_until(lambda: "decode" in collector.of(TRACE), 30)
    spans = collector.of(TRACE)
    request = spans.pop("POST /traced/v1/completions")
    assert reply.headers["traceparent"].split("-")[1:3] == [TRACE, request.span_id.hex()]
    assert reply.headers["tracestate"] == "vendor=x"
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans.values()} == {request.span_id}
    assert spans.keys() >= {"gateway", "transfer", "prefill", "delivery", "decode"}
    (routed,) = request.events
    told = {pair.key: pair.value for pair in routed.attributes}
    assert told["pdmux.instance"].string_value == traced.named("decode")
    assert [each.string_value for each in told["pdmux.prefill_instances"].array_value.values] == [traced.named("prefill")]
    stages = [span for name, span in spans.items() if name != "decode"]
    assert sum(map(seconds, stages)) == pytest.approx(
        traced.metric("pdmux_time_to_first_token_seconds_sum"), abs=0.001
    )  # of the only request
    assert sum(map(seconds, spans.values())) <= seconds(request)
    assert collector.services == {"test"}


def test_a_refused_request_is_told_too(traced: Pair, collector: Collector) -> None:
    reply = httpx.post(f"{traced.url}/v1/completions", json={"model": "other", "prompt": "x"}, timeout=30)
    trace_id = reply.headers["traceparent"].split("-")[1]
    wait_until(lambda: collector.of(trace_id), 30)
    (span,) = collector.of(trace_id).values()
    told = {pair.key: pair.value.string_value for pair in span.attributes}
    assert (reply.status_code, told["pdmux.outcome"], told["error.type"]) == (404, "refused", "UnknownModelError")
