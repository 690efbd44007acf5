from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.counters import Counters, unit_figures
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.latency.correction import Figures
from pdmux_ray.metrics.catalog import TOKEN_BUCKETS_S, GatewayMetrics, LatencyHistogram
from pdmux_ray.policy.decisions import RouteChoice, RouteReason, StepReason
from pdmux_ray.types import FinishReason, Mode


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


def test_drift_and_modes_are_exported_of_the_instances_that_have_them() -> None:
    counters = Counters()
    counters.steps_by_mode[Mode.SPLIT] = 7
    learned = Figures(drifting=2, correction=1.25, observed=900, exceeded=9, factors={"decode": (1.1, 1.3)})
    text = GatewayMetrics("g", dict, lambda: {"one": counters.figures() | learned.exported(), "two": Counters().figures()})
    lines = text.exposition().decode().splitlines()
    assert 'pdmux_mode_steps_total{gateway="g",instance="one",mode="split"} 7.0' in lines
    about = [line for line in lines if not line.startswith("#") and line.split("{")[0] in learned.exported()]
    assert sorted(about) == [
        'pdmux_bound_factor{gateway="g",instance="one",kind="decode"} 1.3',
        'pdmux_correction_factor{gateway="g",instance="one"} 1.25',
        'pdmux_drifting_cells{gateway="g",instance="one"} 2.0',
        'pdmux_exceeded_bounds_total{gateway="g",instance="one"} 9.0',
        'pdmux_predicted_times_total{gateway="g",instance="one"} 900.0',
        'pdmux_prediction_factor{gateway="g",instance="one",kind="decode"} 1.1',
    ]


def test_the_units_that_lanes_really_have_are_exported_by_split() -> None:
    device = FakeRunner(pages=4, page_size=4, step_s=0.1, prefill_s_per_token=0.0, clock=VirtualClock(), layers=2, units=3)
    lines = GatewayMetrics("g", dict, lambda: {"one": unit_figures(device)}).exposition().decode().splitlines()
    assert [line for line in lines if line.startswith(("pdmux_units", "pdmux_prefill_units", "pdmux_decode_units"))] == [
        'pdmux_units{gateway="g",instance="one"} 3.0',
        'pdmux_prefill_units{gateway="g",instance="one",split="2/1"} 2.0',
        'pdmux_prefill_units{gateway="g",instance="one",split="1/2"} 1.0',
        'pdmux_decode_units{gateway="g",instance="one",split="2/1"} 1.0',
        'pdmux_decode_units{gateway="g",instance="one",split="1/2"} 2.0',
    ]


def test_routes_are_counted_by_reason_and_their_predictions_are_kept() -> None:
    metrics = GatewayMetrics("g", dict, dict)
    metrics.routed(RouteChoice("one", RouteReason.LOCAL, predicted_ttft_s=0.25))
    metrics.routed(RouteChoice("one", RouteReason.TIE))
    lines = metrics.exposition().decode().splitlines()
    assert 'pdmux_routed_requests_total{gateway="g",reason="local"} 1.0' in lines
    assert 'pdmux_routed_requests_total{gateway="g",reason="tie"} 1.0' in lines
    assert 'pdmux_predicted_time_to_first_token_seconds_sum{gateway="g"} 0.25' in lines
    assert 'pdmux_predicted_time_to_first_token_seconds_count{gateway="g"} 1.0' in lines


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
