"""From figures to what Prometheus scrapes, by the catalog.

A process hands out its figures when it is asked (`Figures`), so nobody pays for them between two scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdmux_ray.engine.timeline import StepTimes
from pdmux_ray.histogram import Histogram
from pdmux_ray.metrics.catalog import CATALOG, Component, Kind, Metric
from pdmux_ray.types import Load

SCRAPE_SECONDS = "pdmux_scrape_seconds"

# A metric's value; or its values by the value of its label, of two labels by both.
Value: TypeAlias = float | Mapping[str, float] | Mapping[tuple[str, str], float]
Figures: TypeAlias = Mapping[str, Value]  # by the metric's name
Source: TypeAlias = tuple[Mapping[str, str], Figures]  # labels that all of its series have, and what it says

_LOAD: Mapping[str, str] = {  # -> field of `types.Load`
    "pdmux_instance_running_requests": "running",
    "pdmux_instance_waiting_requests": "waiting",
    "pdmux_instance_decoding_requests": "decoding",
    "pdmux_instance_decode_context_tokens": "decode_context_tokens",
    "pdmux_instance_queued_prefill_tokens": "queued_prefill_tokens",
    "pdmux_instance_free_pages": "free_pages",
    "pdmux_instance_pages": "total_pages",
    "pdmux_instance_leased_pages": "leased_pages",
    "pdmux_instance_quarantined_pages": "quarantined_pages",
    "pdmux_instance_steps": "steps",
    "pdmux_instance_step_age_seconds": "step_age_s",
}


def load_figures(load: Load) -> dict[str, float]:
    """An instance's load, by the metrics' names."""
    return {name: getattr(load, field) for name, field in _LOAD.items()}


def families(component: Component, sources: Sequence[Source]) -> Iterator[Family]:
    """Counters and gauges of that component. The sources' own labels have the same names. A metric that no source knows is left
    out."""
    for metric in CATALOG.values():
        if metric.component is component and metric.kind is not Kind.HISTOGRAM:
            told = [(labels, figures[metric.name]) for labels, figures in sources if metric.name in figures]
            if told:
                yield _family(metric, told)


def _family(metric: Metric, told: Sequence[tuple[Mapping[str, str], Value]]) -> Family:
    make: type[CounterMetricFamily | GaugeMetricFamily]
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.meaning, labels=(*told[0][0], *metric.labels))
    for labels, value in told:
        for by, number in _by_labels(value):
            family.add_metric((*labels.values(), *by), number)
    return family


def _by_labels(value: Value) -> Iterator[tuple[tuple[str, ...], float]]:
    if not isinstance(value, Mapping):
        yield (), value
        return
    for by, number in value.items():
        yield (by,) if isinstance(by, str) else by, number


class Histograms(Collector):
    """One metric's histograms, by the values of its labels; `()` of one without."""

    def __init__(self, name: str, series: Mapping[tuple[str, ...], Histogram]) -> None:
        self._metric = CATALOG[name]
        self._series = series

    def collect(self) -> Iterable[Family]:
        family = HistogramMetricFamily(self._metric.name, self._metric.meaning, labels=self._metric.labels)
        for labels, histogram in self._series.items():
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            counts = map(float, accumulate(histogram.counts))
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.sum)
        yield family


def step_histograms(times: StepTimes) -> list[Histograms]:
    """Of an engine."""
    named = (("pdmux_step_seconds", times.took), ("pdmux_predicted_step_seconds", times.predicted))
    return [Histograms(name, {(kind,): histogram for kind, histogram in found.items()}) for name, found in named]


class _Told(Collector):
    """Figures that are asked for at every scrape, and how long it took."""

    def __init__(self, component: Component, figures: Callable[[], Figures]) -> None:
        self._component = component
        self._figures = figures

    def collect(self) -> Iterable[Family]:
        begin_s = time.perf_counter()
        found = list(families(self._component, [({}, self._figures())]))
        if self._component is Component.INSTANCE:
            took_s = {SCRAPE_SECONDS: time.perf_counter() - begin_s}
            found.extend(families(self._component, [({}, took_s)]))
        return found


def registry_of(
    component: Component, figures: Callable[[], Figures], histograms: Iterable[Histograms] = ()
) -> CollectorRegistry:
    """What one process exports. `figures` is called in the thread of whoever scrapes."""
    registry = CollectorRegistry()
    for collector in (_Told(component, figures), *histograms):
        registry.register(collector)
    return registry


def with_label(found: Iterable[Family], name: str, value: str) -> Iterator[Family]:
    """The same families, each series with one label more."""
    for family in found:
        family.samples = [sample._replace(labels={name: value, **sample.labels}) for sample in family.samples]
        yield family
