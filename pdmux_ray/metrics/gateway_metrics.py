"""What one gateway counts and times. Owner: its event loop; scrapes read it from a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import product
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pdmux_ray.histogram import Histogram
from pdmux_ray.metrics.catalog import CATALOG, Component
from pdmux_ray.metrics.exporter import Figures, Histograms, families, load_figures, with_label
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.tiers import DEFAULT
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.types import Load

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter: when it was made

ENDPOINTS = ("chat", "completions")


class Outcome(Enum):
    """How an HTTP request for a completion ended."""

    COMPLETE = "complete"  # every choice finished
    REFUSED = "refused"  # 4xx: the request was wrong or the queue full
    FAILED = "failed"  # 5xx, or an error event after streaming began
    DISCONNECTED = "disconnected"  # its client went away first


class Resumption(Enum):
    """What became of an answer whose instance went away."""

    RESUMED = "resumed"  # another instance goes on with it
    NO_INSTANCE = "no_instance"  # no other can take requests
    TRIED_ENOUGH = "tried_enough"  # several were lost with it, one after the other
    REFUSED = "refused"  # another has refused it, or its time or its client has gone


class Stage(Enum):
    """A part of the time to a first token; they add up to it."""

    GATEWAY = "gateway"  # until it was sent to the instance that made it
    QUEUE = "queue"  # waiting there
    TRANSFER = "transfer"  # its KV on the way there
    PREFILL = "prefill"  # being computed
    DELIVERY = "delivery"  # from the gateway to the instance and back


def stages(ttft_s: float, gateway_s: float, told: tuple[float, float, float]) -> dict[str, float]:
    """Seconds of each `Stage` of a first token, in order. `gateway_s`: until it was sent to its instance; `told`: by that one
    (`types.TokenEvent.stage_s`). What is left is the delivery, so clocks of two machines are never compared."""
    return dict(zip([stage.value for stage in Stage], (gateway_s, *told, ttft_s - gateway_s - sum(told)), strict=True))


Loads: TypeAlias = Callable[[], Mapping[str, Load]]
AllFigures: TypeAlias = Callable[[], Mapping[str, Figures]]


class GatewayMetrics:
    """`registry` has this gateway's own. `exposition` has them with the label `gateway`, and what its instances last told.

    loads     instance id -> its newest load figures
    figures   instance id -> its newest other figures
    tiers     SLO tier -> its objectives
    expected  instances that there should be
    """

    def __init__(
        self,
        gateway_id: str,
        loads: Loads,
        figures: AllFigures,
        tiers: Mapping[str, Slo] | None = None,
        expected: int = 1,
    ) -> None:
        self.registry = CollectorRegistry()
        self._gateway_id = gateway_id
        self._loads = loads
        self._figures = figures
        self.tiers = {DEFAULT: Slo()} if tiers is None else tiers
        self._expected = expected
        outcomes, reasons = [outcome.value for outcome in Outcome], [reason.value for reason in RouteReason]
        self._requests = self._counter("pdmux_requests_total", ENDPOINTS, outcomes)
        self._routed = self._counter("pdmux_routed_requests_total", reasons)
        self._resumed = self._counter("pdmux_resumed_requests_total", [outcome.value for outcome in Resumption])
        self._judged = self._counter("pdmux_slo_requests_total", self.tiers, [verdict.value for verdict in Verdict])
        self.prompt_tokens = self._counter("pdmux_prompt_tokens_total")
        self.cached_tokens = self._counter("pdmux_cached_prompt_tokens_total")
        self.generated_tokens = self._counter("pdmux_generated_tokens_total")
        self.open_requests = Gauge("pdmux_open_requests", CATALOG["pdmux_open_requests"].meaning, registry=self.registry)
        self.ttft_s = self._histogram("pdmux_time_to_first_token_seconds")
        self._predicted_ttft_s = self._histogram("pdmux_predicted_time_to_first_token_seconds")
        self.itl_s = self._histogram("pdmux_inter_token_seconds")
        self.tpot_s = self._histogram("pdmux_time_per_output_token_seconds")
        self.request_s = self._histogram("pdmux_request_seconds")
        self._stages = {stage.value: self._new("pdmux_first_token_stage_seconds") for stage in Stage}
        by_stage: dict[tuple[str, ...], Histogram] = {(stage,): histogram for stage, histogram in self._stages.items()}
        self.registry.register(Histograms("pdmux_first_token_stage_seconds", by_stage))
        self.registry.register(_Facts(self._facts))

    def ended(self, endpoint: str, outcome: Outcome) -> None:
        self._requests.labels(endpoint, outcome.value).inc()

    def judged(self, tier: str, verdict: Verdict) -> None:
        self._judged.labels(tier, verdict.value).inc()

    def routed(self, choice: RouteChoice) -> None:
        self._routed.labels(choice.reason.value).inc()
        if choice.predicted_ttft_s is not None:
            self._predicted_ttft_s.observe(choice.predicted_ttft_s)

    def resumed(self, outcome: Resumption) -> None:
        self._resumed.labels(outcome.value).inc()

    def first_token(self, ttft_s: float, stages_s: Mapping[str, float]) -> None:
        """`stages_s`: see `stages`; empty when its instance does not tell."""
        self.ttft_s.observe(ttft_s)
        for stage, seconds in stages_s.items():
            self._stages[stage].observe(seconds)

    def exposition(self) -> bytes:
        """Prometheus text format. To be called by the event loop."""
        return generate_latest(_Front(self._everything))

    def _everything(self) -> Iterator[Family]:
        instances = self._loads()
        yield from with_label(self.registry.collect(), "gateway", self._gateway_id)
        told: dict[str, Figures] = {name: load_figures(load) for name, load in instances.items()}
        for name, figures in self._figures().items():
            told[name] = {**told.get(name, {}), **figures}
        sources = [({"gateway": self._gateway_id, "instance": name}, figures) for name, figures in told.items()]
        yield from families(Component.INSTANCE, sources)

    def _facts(self) -> Figures:
        slos = self.tiers.items()
        return {
            "pdmux_linked_instances": len(self._loads()),
            "pdmux_expected_instances": self._expected,
            "pdmux_slo_ttft_seconds": {tier: slo.ttft_s for tier, slo in slos if slo.ttft_s is not None},
            "pdmux_slo_ttft_seconds_per_token": {tier: slo.ttft_s_per_token for tier, slo in slos if slo.ttft_s is not None},
            "pdmux_slo_itl_seconds": {tier: slo.itl_s for tier, slo in slos if slo.itl_s is not None},
        }

    def _counter(self, name: str, *values: Iterable[str]) -> Counter:
        """With every series at 0 from the start: the first increment of one that was not there would be nobody's rate."""
        counter = Counter(name, CATALOG[name].meaning, CATALOG[name].labels, registry=self.registry)
        for labels in product(*values) if values else ():
            counter.labels(*labels)
        return counter

    def _new(self, name: str) -> Histogram:
        return Histogram(CATALOG[name].buckets)

    def _histogram(self, name: str) -> Histogram:
        histogram = self._new(name)
        self.registry.register(Histograms(name, {(): histogram}))
        return histogram


class _Facts(Collector):
    def __init__(self, facts: Callable[[], Figures]) -> None:
        self._facts = facts

    def collect(self) -> Iterable[Family]:
        return families(Component.GATEWAY, [({}, self._facts())])


class _Front(Collector):
    def __init__(self, found: Callable[[], Iterable[Family]]) -> None:
        self._found = found

    def collect(self) -> Iterable[Family]:
        return self._found()
