"""How fast a machine was from moment to moment, as the steps of a server on it have shown.

What slows a step, the others on its cores, lasts: for a moment that several steps share, for seconds, for minutes. Times drawn
one by one would lose that. So a simulated device goes through a recorded time, from some moment of it on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_S = 1e-5  # that a step runs before the other lane begins one, to count


class Timed(NamedTuple):
    """A step or block of the record."""

    begin_s: float
    end_s: float
    times: float  # as long as such a step takes in the mean


@dataclass(frozen=True, slots=True)
class Pace:
    """A function of time that begins again after `length_s`: how many seconds what takes one in the mean would take, were it
    always as at that moment. That is what the step of the record took, that had begun last."""

    begins_s: Sequence[float]  # from 0 on
    done_s: Sequence[float]  # in the mean: what is done by then; aligned
    length_s: float
    all_done_s: float  # in `length_s`

    def lasts_s(self, begin_s: float, work_s: float) -> float:
        """How long what takes `work_s` in the mean takes from then on."""
        begin_s %= self.length_s
        at = bisect_right(self.begins_s, begin_s) - 1
        turns, goal_s = divmod(self.done_s[at] + (begin_s - self.begins_s[at]) / self._times(at) + work_s, self.all_done_s)
        at = bisect_right(self.done_s, goal_s) - 1
        return turns * self.length_s + self.begins_s[at] + (goal_s - self.done_s[at]) * self._times(at) - begin_s

    def _times(self, at: int) -> float:
        last = at + 1 == len(self.begins_s)
        took_s = (self.length_s if last else self.begins_s[at + 1]) - self.begins_s[at]
        return took_s / ((self.all_done_s if last else self.done_s[at + 1]) - self.done_s[at])


def joined(records: Iterable[Sequence[Timed]]) -> Pace | None:
    """One after the other, without the time in which nothing ran. None when there are no steps."""
    begins_s, done_s, now_s, all_done_s = list[float](), list[float](), 0.0, 0.0
    for record in records:
        steps = sorted(record)
        nexts_s = [*(step.begin_s for step in steps[1:]), math.inf]
        busy_s = -math.inf
        for step, next_s in zip(steps, nexts_s, strict=False):
            busy_s = max(busy_s, step.end_s)
            lasts_s = min(next_s, busy_s) - step.begin_s
            if lasts_s > LEAST_S:
                begins_s.append(now_s)
                done_s.append(all_done_s)
                now_s += lasts_s
                all_done_s += lasts_s / step.times
    return Pace(tuple(begins_s), tuple(done_s), now_s, all_done_s) if begins_s else None
