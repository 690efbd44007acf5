"""The catalog keeps Prometheus' conventions, and the document is made from it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from pdmux_ray.metrics.catalog import CATALOG, Kind, Metric
from pdmux_ray.metrics.reference import markdown

ROOT = Path(__file__).parents[3]
# Whose values are few and known beforehand: enums of the project, tiers of a config, splits of a device.
LABELS = {
    *("endpoint", "outcome", "reason", "mode", "kind", "split", "lane", "owner", "role", "state", "stage", "tier", "verdict"),
    "phase",
}

metrics = pytest.mark.parametrize("metric", CATALOG.values(), ids=lambda metric: metric.name)


@metrics
def test_a_name_is_in_base_units_and_ends_as_prometheus_wants(metric: Metric) -> None:
    assert re.fullmatch(r"pdmux(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not re.search(r"_(ms|us|milliseconds|kb|mib|percent)(_|$)", metric.name)
    assert ("seconds" in metric.name) == metric.unit.startswith("seconds")


@metrics
def test_a_label_has_few_values_and_none_names_a_process_or_a_request(metric: Metric) -> None:
    assert set(metric.labels) <= LABELS


@metrics
def test_what_a_metric_means_is_a_sentence_and_formulas_can_name_it(metric: Metric) -> None:
    assert metric.meaning.endswith(".")
    assert metric.symbol
    assert "|" not in metric.meaning


@metrics
def test_a_histogram_and_nothing_else_has_buckets_in_ascending_order(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert all(below < above for below, above in pairwise(metric.buckets))


def test_every_symbol_is_used_once() -> None:
    symbols = [metric.symbol for metric in CATALOG.values()]
    assert sorted(symbols) == sorted(set(symbols))


def test_the_document_is_the_one_that_the_catalog_makes() -> None:
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == markdown(), (
        "run python -m pdmux_ray.metrics.reference > docs/metrics.md"
    )
