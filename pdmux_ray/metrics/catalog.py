"""Every metric that a gateway exports: name, labels, unit and meaning stand here and nowhere else.

An instance's series end with it, and its counters are about a second old: they come with its heartbeat.

Seconds are what the gateway sees: from the arrival of the HTTP request's body to the engine's news reaching the handler, by the
functions of `metrics/lifeline.py`.
Every series carries the label `gateway`, because a scrape through Serve's proxy reaches any one of several gateways.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.types import Load

TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


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


Loads: TypeAlias = Callable[[], Mapping[str, Load]]
Figures: TypeAlias = Callable[[], Mapping[str, Mapping[str, float | Mapping[str, float]]]]


class GatewayMetrics:
    """One gateway's metrics. `loads` and `figures` are asked at every scrape.

    loads     instance id -> its newest load figures
    figures   instance id -> metric's name -> its value, or its values by label; those without a latency model have fewer
    """

    def __init__(self, gateway_id: str, loads: Loads, figures: Figures) -> None:
        self._registry = CollectorRegistry()
        self._gateway_id = gateway_id
        self._requests = self._counter("pdmux_requests", "Completion requests by how they ended.", ("endpoint", "outcome"))
        self._routed = self._counter("pdmux_routed_requests", "Requests sent to an instance, by routing reason.", ("reason",))
        self._resumed = self._counter("pdmux_resumed_requests", "Requests whose instance went away, by outcome.", ("outcome",))
        self.prompt_tokens = self._counter("pdmux_prompt_tokens", "Prompt tokens of accepted requests.").labels(gateway_id)
        self.cached_tokens = self._counter("pdmux_cached_prompt_tokens", "Prompt tokens found in a prefix cache.").labels(
            gateway_id
        )
        self.generated_tokens = self._counter("pdmux_generated_tokens", "Tokens generated.").labels(gateway_id)
        self.open_requests = Gauge(
            "pdmux_open_requests", "Completion requests under way.", ("gateway",), registry=self._registry
        ).labels(gateway_id)
        self.ttft_s = self._histogram("pdmux_time_to_first_token_seconds", "Until the first token.", REQUEST_BUCKETS_S)
        self._predicted_ttft_s = self._histogram(
            "pdmux_predicted_time_to_first_token_seconds", "The same as predicted, of requests routed so.", REQUEST_BUCKETS_S
        )
        self.itl_s = self._histogram(
            "pdmux_inter_token_seconds", "Gap between two arrivals of a choice's tokens.", TOKEN_BUCKETS_S
        )
        self.request_s = self._histogram("pdmux_request_seconds", "Until the last token, if complete.", REQUEST_BUCKETS_S)
        self._registry.register(_InstanceLoads(gateway_id, loads))
        self._registry.register(_InstanceFigures(gateway_id, figures))

    def ended(self, endpoint: str, outcome: Outcome) -> None:
        self._requests.labels(self._gateway_id, endpoint, outcome.value).inc()

    def routed(self, choice: RouteChoice) -> None:
        self._routed.labels(self._gateway_id, choice.reason.value).inc()
        if choice.predicted_ttft_s is not None:
            self._predicted_ttft_s.observe(choice.predicted_ttft_s)

    def resumed(self, outcome: Resumption) -> None:
        self._resumed.labels(self._gateway_id, outcome.value).inc()

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, meaning, ("gateway", *labels), registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> LatencyHistogram:
        histogram = LatencyHistogram(name, meaning, buckets, self._gateway_id)
        self._registry.register(histogram)
        return histogram


class LatencyHistogram(Collector):
    """A histogram for the event loop's thread alone: without a lock an observation, one per token, costs a quarter."""

    def __init__(self, name: str, meaning: str, buckets_s: tuple[float, ...], gateway_id: str) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds_s = buckets_s
        self._gateway_id = gateway_id
        self._counts = [0] * (len(buckets_s) + 1)  # of each bucket alone; the last one has no bound
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=("gateway",))
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric((self._gateway_id,), buckets, self._sum_s)
        return [family]


# Name -> (meaning, value of a load).
_LOAD_GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "pdmux_instance_running_requests": ("Requests that hold pages.", lambda load: load.running),
    "pdmux_instance_waiting_requests": ("Requests that wait for pages.", lambda load: load.waiting),
    "pdmux_instance_decoding_requests": ("Requests that decode.", lambda load: load.decoding),
    "pdmux_instance_decode_context_tokens": ("Tokens of those.", lambda load: load.decode_context_tokens),
    "pdmux_instance_queued_prefill_tokens": (
        "Tokens to be prefilled here, of requests that wait or have begun.",
        lambda load: load.queued_prefill_tokens,
    ),
    "pdmux_instance_free_pages": ("KV pages that are free or evictable.", lambda load: load.free_pages),
    "pdmux_instance_pages": ("KV pages in all.", lambda load: load.total_pages),
    "pdmux_instance_leased_pages": (
        "KV pages that nobody holds but a transfer that reads them.",
        lambda load: load.leased_pages,
    ),
    "pdmux_instance_quarantined_pages": (
        "KV pages that nobody may have before a lost transfer has stopped writing into them.",
        lambda load: load.quarantined_pages,
    ),
    "pdmux_instance_steps": ("Steps since the engine started.", lambda load: load.steps),
    "pdmux_instance_step_age_seconds": (
        "How long the step under way had taken when it was reported; 0 without one.",
        lambda load: load.step_age_s,
    ),
}


class _InstanceLoads(Collector):
    def __init__(self, gateway_id: str, loads: Loads) -> None:
        self._gateway_id = gateway_id
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        return self._collect(self._loads())

    def _collect(self, loads: Mapping[str, Load]) -> Iterator[Metric]:
        for name, (meaning, value) in _LOAD_GAUGES.items():
            family = GaugeMetricFamily(name, meaning, labels=("gateway", "instance"))
            for instance_id, load in loads.items():
                family.add_metric((self._gateway_id, instance_id), value(load))
            yield family


# Name -> meaning. Those that `_BY` names have a label more.
_COUNTERS = {
    "pdmux_steps_total": "Steps of the engine, by why the policy made them up as it did.",
    "pdmux_mode_choices_total": "Steps of an engine with lanes, by why they share the device as they do.",
    "pdmux_mode_steps_total": "Steps of an engine with lanes, by how they share the device.",
    "pdmux_bursts_total": "Decodes alone that a device was given at once, one step or several, by why so many.",
    "pdmux_admissions_total": "Requests that were judged by when their first token would come: late ones are refused.",
    "pdmux_engine_finished_total": "Engine requests that ended, by why. A choice is one.",
    "pdmux_prefill_tokens_total": "Tokens computed by prefills, recomputation after preemptions included.",
    "pdmux_engine_generated_tokens_total": "Tokens sampled, also those that no client saw.",
    "pdmux_wasted_tokens_total": "Tokens sampled for requests that had ended earlier in the burst, and thrown away.",
    "pdmux_prefix_hit_tokens_total": "Tokens not computed because the prefix cache had them.",
    "pdmux_preemptions_total": "Requests that lost their pages to older ones and went back to the queue.",
    "pdmux_page_evictions_total": "Cached pages given up for new content.",
    "pdmux_predicted_times_total": "Times of decodes, blocks and one-pass steps that were held against their prediction.",
    "pdmux_exceeded_bounds_total": "Times above their 99 % bound.",
    "pdmux_fetch_choices_total": "Requests with a prefill peer, by whether and why their KV was fetched.",
    "pdmux_fetches_total": "Transfers of KV to this instance that have ended: landed, or by what they were lost.",
    "pdmux_exports_total": "Prefills for other instances, by how they ended.",
    "pdmux_kv_received_tokens_total": "Tokens whose KV has landed here, complete and verified.",
    "pdmux_kv_used_tokens_total": "Received tokens from which a first token was made.",
    "pdmux_kv_landed_bytes_total": "Bytes of KV that have landed here, complete and verified.",
    "pdmux_kv_landing_seconds_total": "From asking for KV until it had landed, summed over what landed.",
    "pdmux_kv_wasted_bytes_total": "Bytes of KV that came for transfers that were lost.",
    "pdmux_kv_quarantines_total": "Transfers that were lost while the peer could still write: their pages were in quarantine.",
    "pdmux_kv_quarantine_seconds_total": "Summed over quarantines that have ended.",
    "pdmux_kv_unsent_total": "Prefills for others that did not get there whole, by why.",
    "pdmux_kv_written_bytes_total": "Bytes of KV that were written to other instances.",
    "pdmux_kv_written_seconds_total": "From the begin of such a write to its end, summed: several run at once.",
    "pdmux_kv_writes_total": "Writes to other instances.",
    "pdmux_kv_failed_writes_total": "Of these, those that failed.",
    "pdmux_kv_fenced_total": "Messages and writes of peers that were refused, by why: stale, replayed or mismatched.",
    "pdmux_kv_refused_peers_total": "Connections with instances that cannot be peers: other software, model or secret.",
    "pdmux_kv_silent_peers_total": "Peers that were given up because they said nothing for too long.",
}
_BY = {
    "pdmux_steps_total": "reason",
    "pdmux_mode_choices_total": "reason",
    "pdmux_mode_steps_total": "mode",
    "pdmux_bursts_total": "reason",
    "pdmux_admissions_total": "reason",
    "pdmux_engine_finished_total": "reason",
    "pdmux_fetch_choices_total": "reason",
    "pdmux_fetches_total": "reason",
    "pdmux_exports_total": "reason",
    "pdmux_kv_unsent_total": "reason",
    "pdmux_kv_fenced_total": "reason",
    "pdmux_prefill_units": "split",
    "pdmux_decode_units": "split",
    "pdmux_prediction_factor": "kind",
    "pdmux_bound_factor": "kind",
}
_GAUGES = {
    "pdmux_units": "Cores, or streaming multiprocessors, of a device with lanes.",
    "pdmux_prefill_units": "What the prefill lane has of them, as the device made it, by split (prefill/decode).",
    "pdmux_decode_units": "What the decode lane has, likewise.",
    "pdmux_kv_peers": "Instances that this one is linked to, so that KV can go between them.",
    "pdmux_drifting_cells": "Kinds of work whose times have moved away from the profile: at 0 it fits.",
    "pdmux_correction_factor": "Measured over predicted by the profile, of the kind of work furthest from it.",
    "pdmux_prediction_factor": "Measured over predicted by the profile, of a kind of work alone on the device.",
    "pdmux_bound_factor": "The same of its 99 % bound: what routes are predicted with.",
}


class _InstanceFigures(Collector):
    def __init__(self, gateway_id: str, figures: Figures) -> None:
        self._gateway_id = gateway_id
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return self._collect(self._figures())

    def _collect(self, figures: Mapping[str, Mapping[str, float | Mapping[str, float]]]) -> Iterator[Metric]:
        for kind, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, meaning in metrics.items():
                label = _BY.get(name)
                family = kind(name, meaning, labels=("gateway", "instance", *([label] if label else [])))
                for instance_id, found in figures.items():
                    value = found.get(name, {})  # {}: nothing has come yet, or it has none
                    for by, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
                        family.add_metric([self._gateway_id, instance_id, *([by] if by is not None else [])], number)
                yield family
