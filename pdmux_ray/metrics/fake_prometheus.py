"""A Prometheus server that is a function, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pdmux_ray.metrics.prometheus import Series

# (query, seconds since the epoch) -> what it says then: labels with a value.
Answer = Callable[[str, float], Iterable[tuple[Mapping[str, str], float]]]


@dataclass
class FakePrometheus:
    """In the place of a `Prometheus`. `asked`: every query so far."""

    answer: Answer
    asked: list[str] = field(default_factory=list)

    def query(self, expr: str, at_s: float | None = None) -> list[Series]:
        self.asked.append(expr)
        at_s = 0.0 if at_s is None else at_s
        return [Series(labels, ((at_s, value),)) for labels, value in self.answer(expr, at_s)]

    def query_range(self, expr: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        self.asked.append(expr)
        found: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for i in range(int((end_s - begin_s) / step_s + 1e-9) + 1):
            for labels, value in self.answer(expr, begin_s + i * step_s):
                found.setdefault(tuple(labels.items()), []).append((begin_s + i * step_s, value))
        return [Series(dict(labels), points) for labels, points in found.items()]
