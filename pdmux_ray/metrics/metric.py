"""What a metric is: one row of the catalog. See `metrics/catalog.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus' kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Component(StrEnum):
    """What kind of process has the figure."""

    GATEWAY = "gateway"
    INSTANCE = "instance"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Metric:
    """`buckets`: upper bounds of a histogram, in `unit`, without the last one, which has none."""

    name: str
    kind: Kind
    component: Component
    meaning: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    important: bool = False  # it must be on a dashboard
    symbol: str = ""  # what formulas call it


class Rows:
    """Makes the rows of one component."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def counter(self, name: str, symbol: str, unit: str, meaning: str, *labels: str, important: bool = False) -> Metric:
        return Metric(name, Kind.COUNTER, self._component, meaning, unit, labels, important=important, symbol=symbol)

    def gauge(self, name: str, symbol: str, unit: str, meaning: str, *labels: str, important: bool = False) -> Metric:
        return Metric(name, Kind.GAUGE, self._component, meaning, unit, labels, important=important, symbol=symbol)

    def seconds(self, name: str, symbol: str, buckets: tuple[float, ...], meaning: str, *labels: str) -> Metric:
        """A histogram. All of them are important."""
        return Metric(name, Kind.HISTOGRAM, self._component, meaning, "seconds", labels, buckets, True, symbol)
