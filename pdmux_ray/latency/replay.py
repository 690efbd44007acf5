"""What the profile had said of steps of which a timeline has what the server predicted: that is the same, corrected by what the
server had learned by then.

It learned from each of these steps, so they teach the same corrections once more. How those were before the first step nobody
has told, how they were after the last one the server has (its lessons): a beginning is sought that ends there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pdmux_ray.latency.correction import CorrectedCosts, Lesson
from pdmux_ray.latency.model import FittedCosts

_TRIES = 6  # each one leaves what the steps let the corrections forget, of how far off the beginning is


class Timed(NamedTuple):
    """A step, or a block."""

    kind: str  # of `correction.KINDS`
    units: int
    beside: int  # units of the other lane; 0: alone
    took_s: float
    predicted_s: float  # by the server


def profiled_s(steps: Sequence[Timed], lessons: Sequence[Lesson], base: FittedCosts) -> list[float]:
    """Of each. `steps`: in the order in which they ended; `lessons`: after the last one; `base`: any, it is not asked."""
    here = Counter((step.kind, step.units, step.beside) for step in steps)
    wanted = {lesson[:4]: lesson.factor for lesson in lessons}
    whole = {lesson[:3]: max(lesson.times, 1) for lesson in lessons if lesson.size is None}
    before = {part: max(1 - here[part] / times, 0.0) for part, times in whole.items()}  # what share it had learned
    begin = [lesson._replace(times=max(round(lesson.times * before[lesson[:3]]), 1)) for lesson in lessons]
    found = list[float]()
    for _ in range(_TRIES):
        costs = CorrectedCosts(base, begin)
        found = [costs.learn_again(*step[:3], step.predicted_s, step.took_s) for step in steps]
        ended = {lesson[:4]: lesson.factor for lesson in costs.lessons()}
        begin = [lesson._replace(factor=lesson.factor * wanted[lesson[:4]] / ended[lesson[:4]]) for lesson in begin]
    return found
