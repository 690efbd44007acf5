"""AUTO: which way of sharing the device a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdmux_ray.policy.decisions import ModeReason
from pdmux_ray.policy.sharing import Way
from pdmux_ray.types import Mode

NEAR = 1.05  # ways within this factor of the best count as equals: then the shorter decode step counts
SAFE = 1.2  # a prefill is in time when it would be even if it took so many times what is predicted
LITTLE = 1.25  # a bound that misses by no more than this factor misses by little


class Need(NamedTuple):
    """What ways are measured by. Seconds."""

    itl_s: float  # the objective
    left_s: float  # until the most urgent first token is due; inf: nobody said when
    decode_s: float  # what the decodes would take with the device to themselves
    prefill_s: float  # and what is left of the prefill
    waited_s: float = 0.0  # of the objective, since the decodes had their last tokens: a block of TIME_SHARED came between

    def bound_s(self, way: Way) -> float:
        """Of the next gap that is up to this step. With TIME_SHARED the decodes come first, and the gap that its block makes
        begins with their tokens; every other way makes the one that has begun longer."""
        return way.gap_s.bound_s if way.mode is Mode.TIME_SHARED else self.waited_s + way.gap_s.bound_s


class Choice(NamedTuple):
    """The way a step takes."""

    way: Way
    why: ModeReason
    itl_s: float  # what is left of the objective that it was chosen by, or in a hurry of what stands for it


def choose_in_time(best: Callable[[Need], tuple[Way, ModeReason]], need: Need) -> Choice:
    """`best`: the way for a need. With the ITL objective; when that one would not end the prefill by the TTFT deadline, with an
    objective that is a little longer, if it would by that."""
    calm, why = best(need)
    if calm.finish_s <= need.left_s or need.left_s <= 0 or why is ModeReason.BEST_EFFORT:
        return Choice(calm, why, need.itl_s - need.waited_s)
    loose = need._replace(itl_s=LITTLE * need.itl_s)
    hurried, _ = best(loose)
    if hurried.finish_s > need.left_s:
        return Choice(calm, why, need.itl_s - need.waited_s)
    return Choice(hurried, ModeReason.HURRY, loose.itl_s - need.waited_s)


def work_rate(way: Way, need: Need) -> float:
    """How much of a way's decodes and prefill gets done in a second, in seconds that the whole device would take for it."""
    return need.decode_s / way.gap_s.predicted_s + need.prefill_s / way.finish_s


def choose_way(
    ways: Sequence[Way], need: Need, mode: Mode, mode_age_s: float, switch_s: float, dwell: float
) -> tuple[Way, ModeReason]:
    """Of the ways whose ITL bound holds, those that end the prefill safely in time, and of these the one that gets most work
    done: the first token needs no more haste, and what is saved serves those who come later. Where that is uncertain, or no
    time was said, the one that ends the prefill soonest. When it is late whatever is done, again the one that gets most work
    done: haste would help nobody, and hold up those who can still be in time. Of equals, the one with the shorter decode step.

    When no bound holds, the same among those that miss by little more than the least: to prefill nothing helps nobody.

    The mode of the last step stays while it is among them, until it is `dwell` x `switch_s` / gain old: a change that gains
    little must be worth it for long. The gain is the part of the time that the change saves.
    """
    why = ModeReason.SOONEST
    cost: Callable[[Way], float] = _finish_s
    fit = [way for way in ways if need.bound_s(way) <= need.itl_s]
    if not fit:
        why = ModeReason.BEST_EFFORT
        least_s = min(map(need.bound_s, ways))
        fit = [way for way in ways if need.bound_s(way) <= LITTLE * least_s]
    elif need.left_s < math.inf and (in_time := [way for way in fit if SAFE * way.finish_s <= need.left_s]):
        why, cost, fit = ModeReason.SLACK, _per_work(need), in_time
    elif need.left_s < min(way.finish_s for way in fit):
        why, cost = ModeReason.LATE, _per_work(need)
    least = NEAR * min(map(cost, fit))
    best = min((way for way in fit if cost(way) <= least), key=lambda way: way.gap_s.predicted_s)
    current = next((way for way in fit if way.mode is mode), best)
    gain = 1 - cost(best) / cost(current)
    if current is not best and (gain <= 0 or mode_age_s * gain < dwell * switch_s):
        return current, ModeReason.DWELL
    return best, why


def _finish_s(way: Way) -> float:
    return way.finish_s


def _per_work(need: Need) -> Callable[[Way], float]:
    return lambda way: 1 / work_rate(way, need)
