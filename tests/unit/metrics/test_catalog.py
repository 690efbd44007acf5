from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdmux_ray.engine.counters import Counters
from pdmux_ray.metrics.catalog import TOKEN_BUCKETS_S, GatewayMetrics, LatencyHistogram
from pdmux_ray.policy.decisions import StepReason
from pdmux_ray.types import FinishReason


def test_every_counter_of_an_engine_is_exported_per_instance() -> None:
    counters = Counters(preemptions=3, prefill_tokens=40)
    counters.steps_by_reason[next(iter(StepReason))] = 5
    counters.finished[FinishReason.STOP] = 2
    text = GatewayMetrics("g", dict, lambda: {"one": counters.figures(), "two": {}}).exposition().decode()
    samples = {
        (sample.name, sample.labels.get("reason")): (sample.labels["instance"], sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "instance" in sample.labels
    }
    assert {name for name, _ in samples} == set(counters.figures())
    assert samples["pdmux_preemptions_total", None] == ("one", 3)
    assert samples["pdmux_prefill_tokens_total", None] == ("one", 40)
    assert samples["pdmux_engine_finished_total", "stop"] == ("one", 2)
    assert samples["pdmux_steps_total", next(iter(StepReason)).value] == ("one", 5)


def test_a_latency_histogram_is_exported_as_the_library_would_export_it() -> None:
    values = (0.0, 0.005, 0.0050001, 0.3, 5.0, 7.5)
    library = CollectorRegistry()
    theirs = Histogram("x_seconds", "Meaning.", ("gateway",), buckets=TOKEN_BUCKETS_S, registry=library).labels("g")
    mine, ours = CollectorRegistry(), LatencyHistogram("x_seconds", "Meaning.", TOKEN_BUCKETS_S, "g")
    mine.register(ours)
    for value in values:
        theirs.observe(value)
        ours.observe(value)

    def samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            (sample.name, sample.labels.get("le")): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert samples(mine) == samples(library)
