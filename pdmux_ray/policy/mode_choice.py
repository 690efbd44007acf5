"""AUTO: which way of sharing the device a step takes: the one by which the fewest requests are expected to miss an objective.

    expected misses = decodes * P(a gap over the ITL objective before the prefill ends)
                    + MISSES_PER_LATE_TOKEN * prompts * P(a prefill that ends after its TTFT deadline)
                    + MISSES_PER_LOST_SECOND * requests * seconds of the device that are lost

A first token that is late already, or due at no time, counts by the seconds that it still takes. How surely a prefill of
several steps ends in time is told by the bound of one of them.

Lost is what a way takes longer than the whole device would take for the same prefill and decodes: requests that stay longer
make batches larger and queues longer. To ask only for bounds that hold would not do. Who reads 65 tokens while eleven prompts
come is beside 20 or 30 steps with a prefill: steps that all keep a 99 % bound break every fifth such request. And a prompt that
is cut into two steps, each just below the objective, breaks more gaps than one step just above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pdmux_ray.policy.chances import chance_over
from pdmux_ray.policy.decisions import ModeReason
from pdmux_ray.policy.sharing import Way
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import Mode

# `python -m pdmux_ray.bench.auto_weights --profile FILE` simulates servers with other values, at ten kinds and rates of work.
# In two draws of 400 requests each (--seed 0 and 1) the mean share of good requests is 81.9 to 86.5 % with 1, 2 and 4 for
# each of the two; these have 86.5 and 82.7 %, the best of both draws (4 and 1) 85.8 and 86.2 %, split 86.2 and 82.5 %. One
# miss for a late token has 83.8 % in the mean of all, two 84.8, four 85.0. A draw moves a mean by as much as the weights do:
# these are no fine optimum.
MISSES_PER_LATE_TOKEN = 2.0  # misses that a late first token counts for: those behind it are later, too
MISSES_PER_LOST_SECOND = 2.0  # misses, for a second lost to a request


class Need(NamedTuple):
    """What ways are measured by. Seconds."""

    itl_s: float  # the objective
    left_s: float  # until the most urgent first token is due; inf: nobody said when
    decode_s: float  # what the decodes would take with the device to themselves
    prefill_s: float  # and what is left of the prefill
    decodes: int
    prompts: int  # of the prefill
    others: int = 0  # prompts that wait behind it
    waited_s: float = 0.0  # of the objective, since the decodes had their last tokens: a block of TIME_SHARED came between

    @property
    def requests(self) -> int:
        return self.decodes + self.prompts + self.others

    def room_s(self, way: Way) -> float:
        """Of the objective, for the gap that this step makes or ends. With TIME_SHARED the decodes come first, and the gap that
        its block makes begins with their tokens; every other way makes the one that has begun longer."""
        return self.itl_s if way.mode is Mode.TIME_SHARED else self.itl_s - self.waited_s

    def kept_by(self, way: Way) -> bool:
        """Whether the bound of the gap meets the ITL objective."""
        return way.gap_s.bound_s <= self.room_s(way)


def expected_misses(way: Way, need: Need) -> float:
    """As the module says."""
    steps = max(1.0, way.finish_s / way.gap_s.predicted_s)
    gaps = need.decodes * (1 - math.pow(1 - chance_over(way.gap_s, need.room_s(way)), steps))
    lost_s = way.finish_s - steps * need.decode_s - need.prefill_s
    return gaps + _first_tokens(way, need) + MISSES_PER_LOST_SECOND * need.requests * lost_s


def choose_way(
    ways: Sequence[Way], need: Need, mode: Mode, mode_age_s: float, switch_s: float, dwell: float
) -> tuple[Way, ModeReason]:
    """The way with the fewest expected misses. The mode of the last step stays for `dwell` x `switch_s`, unless the change
    gains more than the `switch_s` that it costs."""
    misses = [expected_misses(way, need) for way in ways]
    fewest = min(misses)
    best = ways[misses.index(fewest)]
    if best.mode is not mode and mode_age_s < dwell * switch_s:
        stays = [(missed, place) for place, missed in enumerate(misses) if ways[place].mode is mode]
        if stays and (min(stays)[0] - fewest) / (MISSES_PER_LOST_SECOND * need.requests) <= switch_s:
            return ways[min(stays)[1]], ModeReason.DWELL
    return best, _reason(best, ways, need)


def _first_tokens(way: Way, need: Need) -> float:
    if need.left_s <= 0 or need.left_s == math.inf:
        return MISSES_PER_LOST_SECOND * need.prompts * way.finish_s
    widening = way.gap_s.bound_s / way.gap_s.predicted_s
    return MISSES_PER_LATE_TOKEN * need.prompts * chance_over(Estimate(way.finish_s, way.finish_s * widening), need.left_s)


def _reason(way: Way, ways: Sequence[Way], need: Need) -> ModeReason:
    if need.kept_by(way):
        return ModeReason.SLACK if way.finish_s <= need.left_s else ModeReason.LATE
    return ModeReason.RISK if any(need.kept_by(other) for other in ways) else ModeReason.BEST_EFFORT
