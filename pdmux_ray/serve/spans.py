"""A request as OpenTelemetry spans. Everything is said by its gateway, when the answer closes, so that no token costs anything:
what an instance did comes in the seconds that it tells with the first token (`pdmux_first_token_stage_seconds`).

    POST /v1/chat/completions     from the request's head to its end; it continues its caller's trace
        gateway                   reading and routing, until it is sent off         ┐
        queue                     waiting at the instance                           │ the stages of the first token: one after
        transfer                  prefilled at another one, its KV on the way here  │ the other, they are its TTFT. One of no
        prefill                   computing where it decodes                        │ length is left out
        delivery                  on the way to the instance and back               ┘
        decode                    from the first token to the last, as they reach the gateway

With several choices each has its own, told apart by `pdmux.choice`. A request that went back to an earlier stage (its KV was
lost, it was preempted) shows the sum of each stage: then the order is not how it was. Prompts and texts are never told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pdmux_ray import __version__
from pdmux_ray.config import TracingConfig
from pdmux_ray.metrics.gateway_metrics import Outcome
from pdmux_ray.policy.decisions import RouteChoice

if TYPE_CHECKING:
    from pdmux_ray.serve.generation import Choice
    from pdmux_ray.serve.tracing import Headers, Served

_W3C = TraceContextTextMapPropagator()


def provider_of(config: TracingConfig, gateway_id: str) -> TracerProvider:
    """Not the process's global one, which is Ray's to set. It ends with its owner, who must close it."""
    resource = Resource.create(
        {"service.name": config.service_name, "service.version": __version__, "service.instance.id": gateway_id}
    )
    return TracerProvider(ParentBasedTraceIdRatio(config.sample_ratio), resource, shutdown_on_exit=False)


def exporting(config: TracingConfig, gateway_id: str) -> TracerProvider:
    """Sends spans in a thread of its own, a batch every few seconds. While the collector is away they are dropped."""
    provider = provider_of(config, gateway_id)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
    return provider


class SpanTracer:
    """Implements `pdmux_ray.serve.tracing.Tracer`. `model`: as clients call it."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pdmux_ray", __version__)
        self._model = model

    def begin(self, path: str, headers: Headers) -> SpanTrace:
        attributes = {"http.request.method": "POST", "http.route": path, "gen_ai.request.model": self._model}
        caller = _W3C.extract(headers, Context())
        span = self._tracer.start_span(f"POST {path}", caller, api.SpanKind.SERVER, attributes)
        return SpanTrace(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class SpanTrace:
    """Implements `pdmux_ray.serve.tracing.Trace`."""

    def __init__(self, tracer: api.Tracer, span: api.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # of `time.monotonic`, whose seconds everybody else tells

    @property
    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, api.set_span_in_context(self._span, Context()))
        return carrier

    def routed(self, choice: RouteChoice) -> None:
        """More than one of these events: an instance was lost, and another one went on."""
        attributes = {
            "pdmux.instance": choice.instance_id or "",
            "pdmux.route.reason": choice.reason.value,
            "pdmux.prefill_instances": list(choice.prefill),
        }
        self._span.add_event("routed", attributes)

    def ended(self, outcome: Outcome, error: BaseException | None = None, served: Iterable[Served] = ()) -> None:
        span = self._span
        if not span.is_recording():
            return
        span.set_attribute("pdmux.outcome", outcome.value)
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
        if outcome is Outcome.FAILED:
            span.set_status(api.Status(api.StatusCode.ERROR, str(error)))
        choices = []
        for each in served:
            self._tell(each)
            choices.append(each.choice)
        if choices:
            span.set_attributes(_usage(choices))
        span.end()

    def _tell(self, served: Served) -> None:
        """The spans of one choice, as far as it got."""
        choice, lifeline, stages_s = served
        at_s = lifeline.due_s
        for stage, seconds in stages_s.items():
            self._child(stage, choice.index, at_s, at_s + seconds)
            at_s += seconds
        if len(lifeline.token_s) > 1:
            self._child("decode", choice.index, lifeline.token_s[0], lifeline.token_s[-1])

    def _child(self, name: str, choice: int, begin_s: float, end_s: float) -> None:
        if end_s > begin_s:
            parent = api.set_span_in_context(self._span, Context())
            child = self._tracer.start_span(name, parent, attributes={"pdmux.choice": choice}, start_time=self._ns(begin_s))
            child.end(self._ns(end_s))

    def _ns(self, at_s: float) -> int:
        """Since the epoch."""
        return self._epoch_ns + round(at_s * 1e9)


def _usage(choices: Sequence[Choice]) -> dict[str, AttributeValue]:
    """In the words of OpenTelemetry's conventions for generative models. A prompt counts once, however many choices it has."""
    prompts = [choice for choice in choices if choice.first_of_prompt]
    return {
        "gen_ai.request.choice.count": len(choices),
        "gen_ai.usage.input_tokens": sum(choice.prompt_tokens for choice in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(choice.cached_tokens for choice in prompts),
        "gen_ai.usage.output_tokens": sum(choice.completion_tokens for choice in choices),
        "gen_ai.response.finish_reasons": [choice.finish or "" for choice in choices],
    }
