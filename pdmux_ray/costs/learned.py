"""How long a server's steps take, as it has learned itself: from its timeline, as `pdmux timeline URL --out FILE` leaves it.

A profile is measured with nothing else at work; where gateway, client and engine share cores, steps take longer, short ones by
more. An instance that plans by a profile learns by how much (`latency.correction`), and tells it with its timeline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import KINDS, Lesson
from pdmux_ray.latency.model import size_of
from pdmux_ray.metrics.trace import Trace, slices_of

LEAST_TIMES = 32  # of what is used: the first ones say little

Where: TypeAlias = tuple[str, int | None, int | None, int | None]  # kind, units, beside, size; None: of all


@dataclass(frozen=True, slots=True)
class Learned:
    """A `StepFactors`. What was not measured is as slow as what is most like it: other sizes, other units, anything."""

    factors: Mapping[Where, float]
    times: int  # all that it was learned from
    residuals: tuple[float, ...]  # of steps: measured / what the server predicted; stalls included

    def of(self, kind: str, units: int, beside: int, predicted_s: float) -> float:
        """How many times as long such a step takes as the profile predicts."""
        size = size_of(predicted_s)
        wheres: tuple[Where, ...] = ((kind, units, beside, size), (kind, units, beside, None), (kind, None, None, None))
        for where in wheres:
            factor = self.factors.get(where)
            if factor is not None:
                return factor
        return self.factors["", None, None, None]

    def __str__(self) -> str:
        by_kind = {kind: self.factors.get((kind, None, None, None)) for kind in KINDS}
        words = [f"{kind} {factor:.3g}" for kind, factor in by_kind.items() if factor is not None]
        return f"{', '.join(words)} in the mean, learned from {self.times:,} steps"


def read(paths: Sequence[Path]) -> Learned:
    """Of several timelines together. Raises ConfigError when one is none, or when they teach nothing."""
    lessons, residuals = list[Lesson](), list[float]()
    for path in paths:
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            lessons += [Lesson(*row) for about in trace["otherData"]["instances"].values() for row in about.get("lessons", ())]
            residuals += _residuals(trace)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{path} is no timeline of a server ({error!r}). `pdmux timeline URL --out FILE` leaves one."
            raise ConfigError(text) from None
    return learned(lessons, residuals, ", ".join(map(str, paths)))


def learned(lessons: Sequence[Lesson], residuals: Sequence[float], where: str) -> Learned:
    """Of any number of instances. Raises ConfigError when there are too few times; `where` they are from is for its words."""
    parts = [lesson for lesson in lessons if lesson.size is None]
    by_where: dict[Where, list[Lesson]] = {("", None, None, None): parts}
    for lesson in lessons:
        by_where.setdefault((lesson.kind, lesson.units, lesson.beside, lesson.size), []).append(lesson)
    for lesson in parts:
        by_where.setdefault((lesson.kind, None, None, None), []).append(lesson)
    factors = {at: _mean(group) for at, group in by_where.items() if sum(one.times for one in group) >= LEAST_TIMES}
    times = sum(lesson.times for lesson in parts)
    if times < LEAST_TIMES:
        raise ConfigError(
            f"{where}: the server has learned from {times} steps, which is too few. It must plan by a profile "
            "(engine.multiplex.profile) and have served some load."
        )
    return Learned(factors, times, tuple(residuals))


def _mean(group: Iterable[Lesson]) -> float:
    """Geometric, by times."""
    pairs = [(one.times, math.log(one.factor)) for one in group]
    return math.exp(sum(times * log for times, log in pairs) / sum(times for times, _ in pairs))


def _residuals(trace: Trace) -> list[float]:
    steps = [step for name in trace["otherData"]["instances"] for step in slices_of(trace, name)]
    return [step.took_s / step.predicted_s for step in steps if step.counted and step.predicted_s]
