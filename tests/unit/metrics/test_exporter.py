"""What processes export, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.parser import text_string_to_metric_families

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.counters import Counters, unit_figures
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.timeline import StepTimes
from pdmux_ray.histogram import Histogram
from pdmux_ray.latency.correction import Figures
from pdmux_ray.metrics.catalog import CATALOG, TOKEN_BUCKETS_S, Component, Kind
from pdmux_ray.metrics.exporter import Histograms, load_figures, registry_of, step_histograms
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics, Outcome, stages
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.policy.decisions import RouteChoice, RouteReason, StepReason
from pdmux_ray.types import FinishReason, Load, Mode

LOAD = Load(1, 2, 3, 4, 5, 0.5, 6, 7, 8, 9, 10)


def lines(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


def samples(text: bytes) -> dict[str, float]:
    """Series -> its value."""
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines(text))}


def test_every_counter_of_an_engine_is_on_the_front_per_instance() -> None:
    counters = Counters(preemptions=3, prefill_tokens=40)
    counters.steps_by_reason[next(iter(StepReason))] = 5
    counters.finished[FinishReason.STOP] = 2
    text = GatewayMetrics("g", dict, lambda: {"one": counters.figures(), "two": {}}).exposition().decode()
    found = {
        (sample.name, sample.labels.get("reason")): (sample.labels["instance"], sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "instance" in sample.labels
    }
    assert {name for name, _ in found} == set(counters.figures())
    assert found["pdmux_preemptions_total", None] == ("one", 3)
    assert found["pdmux_prefill_tokens_total", None] == ("one", 40)
    assert found["pdmux_engine_finished_total", "stop"] == ("one", 2)
    assert found["pdmux_steps_total", next(iter(StepReason)).value] == ("one", 5)


def test_drift_and_modes_are_on_the_front_of_the_instances_that_have_them() -> None:
    counters = Counters()
    counters.steps_by_mode[Mode.SPLIT] = 7
    learned = Figures(drifting=2, correction=1.25, observed=900, exceeded=9, factors={"decode": (1.1, 1.3)})
    text = GatewayMetrics("g", dict, lambda: {"one": counters.figures() | learned.exported(), "two": Counters().figures()})
    found = lines(text.exposition())
    assert 'pdmux_mode_steps_total{gateway="g",instance="one",mode="split"} 7.0' in found
    assert sorted(line for line in found if line.split("{")[0] in learned.exported()) == [
        'pdmux_bound_factor{gateway="g",instance="one",kind="decode"} 1.3',
        'pdmux_correction_factor{gateway="g",instance="one"} 1.25',
        'pdmux_drifting_cells{gateway="g",instance="one"} 2.0',
        'pdmux_exceeded_bounds_total{gateway="g",instance="one"} 9.0',
        'pdmux_predicted_times_total{gateway="g",instance="one"} 900.0',
        'pdmux_prediction_factor{gateway="g",instance="one",kind="decode"} 1.1',
    ]


def test_the_units_that_lanes_really_have_are_exported_by_split() -> None:
    device = FakeRunner(pages=4, page_size=4, step_s=0.1, prefill_s_per_token=0.0, clock=VirtualClock(), layers=2, units=3)
    found = lines(generate_latest(registry_of(Component.INSTANCE, lambda: unit_figures(device))))
    assert [line for line in found if line.startswith(("pdmux_units", "pdmux_prefill_units", "pdmux_decode_units"))] == [
        "pdmux_units 3.0",
        'pdmux_prefill_units{split="2/1"} 2.0',
        'pdmux_prefill_units{split="1/2"} 1.0',
        'pdmux_decode_units{split="2/1"} 1.0',
        'pdmux_decode_units{split="1/2"} 2.0',
    ]


def test_an_instance_exports_its_load_without_a_word_of_who_it_is() -> None:
    found = samples(generate_latest(registry_of(Component.INSTANCE, lambda: load_figures(LOAD))))
    assert found.pop("pdmux_scrape_seconds") > 0
    assert found == load_figures(LOAD)
    assert sorted(found.values()) == [0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # every field, once


def test_step_times_are_exported_measured_and_predicted_by_kind() -> None:
    times = StepTimes()
    times.note("decode", 0.02, 0.025)
    times.note("prefill", 0.5, None)
    found = samples(generate_latest(registry_of(Component.INSTANCE, dict, step_histograms(times))))
    assert found['pdmux_step_seconds_sum{kind="decode"}'] == 0.02
    assert found['pdmux_predicted_step_seconds_sum{kind="decode"}'] == 0.025
    assert found['pdmux_step_seconds_count{kind="prefill"}'] == 1
    assert found['pdmux_predicted_step_seconds_count{kind="prefill"}'] == 0
    assert found['pdmux_step_seconds_bucket{kind="decode",le="0.02"}'] == 1


def test_figures_of_two_labels_are_told_by_both() -> None:
    told = {("prefill", "planned"): 2.0, ("mux", "observed"): 1.0}
    found = samples(generate_latest(registry_of(Component.CONTROLLER, lambda: {"pdmux_placement_instances": told})))
    assert found == {
        'pdmux_placement_instances{role="prefill",state="planned"}': 2.0,
        'pdmux_placement_instances{role="mux",state="observed"}': 1.0,
    }


def test_routes_are_counted_by_reason_and_their_predictions_are_kept() -> None:
    metrics = GatewayMetrics("g", dict, dict)
    metrics.routed(RouteChoice("one", RouteReason.LOCAL, predicted_ttft_s=0.25))
    metrics.routed(RouteChoice("one", RouteReason.TIE))
    found = samples(metrics.exposition())
    assert found['pdmux_routed_requests_total{gateway="g",reason="local"}'] == 1
    assert found['pdmux_routed_requests_total{gateway="g",reason="tie"}'] == 1
    assert found['pdmux_predicted_time_to_first_token_seconds_sum{gateway="g"}'] == 0.25
    assert found['pdmux_predicted_time_to_first_token_seconds_count{gateway="g"}'] == 1


def test_a_gateway_has_every_series_from_the_start_and_no_more_later() -> None:
    """Or the first request of a kind would be no increase of anything."""
    metrics = GatewayMetrics("g", dict, dict, {"default": Slo(0.5, 0.05), "batch": Slo()}, expected=3)
    before = samples(generate_latest(metrics.registry))
    metrics.ended("chat", Outcome.REFUSED)
    metrics.judged("batch", Verdict.ITL)
    metrics.routed(RouteChoice("one", RouteReason.LATE))
    metrics.first_token(0.5, stages(0.5, 0.125, (0.25, 0.0, 0.0625)))
    after = samples(generate_latest(metrics.registry))
    assert before.keys() == after.keys()
    assert after['pdmux_slo_requests_total{tier="batch",verdict="itl"}'] == 1
    assert after["pdmux_expected_instances"] == 3
    assert after['pdmux_slo_ttft_seconds{tier="default"}'] == 0.5
    assert 'pdmux_slo_ttft_seconds{tier="batch"}' not in after


def test_every_metric_of_a_gateway_is_exported_and_every_one_exported_is_in_the_catalog() -> None:
    metrics = GatewayMetrics("g", dict, dict, {"default": Slo(0.5, 0.05)})
    families = {
        family.name: family.type for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
    }
    mine = {m.name.removesuffix("_total"): m.kind for m in CATALOG.values() if m.component is Component.GATEWAY}
    assert families == mine


def test_the_stages_of_a_first_token_add_up_to_it() -> None:
    found = stages(0.5, 0.125, (0.25, 0.0, 0.0625))
    assert found == {"gateway": 0.125, "queue": 0.25, "transfer": 0.0, "prefill": 0.0625, "delivery": 0.0625}
    metrics = GatewayMetrics("g", dict, dict)
    metrics.first_token(0.5, found)
    exported = samples(generate_latest(metrics.registry))
    parts = [value for name, value in exported.items() if name.startswith("pdmux_first_token_stage_seconds_sum")]
    assert sum(parts) == exported["pdmux_time_to_first_token_seconds_sum"] == 0.5


def test_a_histogram_is_exported_as_the_library_would_export_it() -> None:
    values = (0.0, 0.005, 0.0050001, 0.3, 5.0, 7.5)
    name = "pdmux_inter_token_seconds"
    library, mine, ours = CollectorRegistry(), CollectorRegistry(), Histogram(TOKEN_BUCKETS_S)
    theirs = LibraryHistogram(name, CATALOG[name].meaning, buckets=TOKEN_BUCKETS_S, registry=library)
    mine.register(Histograms(name, {(): ours}))
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    assert samples(generate_latest(mine)) == samples(generate_latest(library))


def test_no_counter_of_an_engine_is_missing_in_the_catalog() -> None:
    told = Counters().figures()
    assert {name for name in told if name not in CATALOG} == set()
    assert {CATALOG[name].kind for name in told} == {Kind.COUNTER}
    labelled = {name for name, value in told.items() if isinstance(value, dict)}
    assert labelled == {name for name in told if CATALOG[name].labels}
