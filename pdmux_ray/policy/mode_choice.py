"""AUTO: which way of sharing the device a step takes."""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.policy.decisions import ModeReason
from pdmux_ray.policy.sharing import Way
from pdmux_ray.types import Mode

NEAR = 1.05  # prefills that end within this factor of the earliest count as equals: then the shorter decode step counts
LITTLE = 1.25  # a bound that misses by no more than this factor misses by little
MUCH = 1.5  # times sooner


def in_hurry(calm: Way, hurried: Way, left_s: float) -> bool:
    """Whether `hurried`, which misses the ITL objective by little, is worth it: `calm`, which keeps it, would not end the
    prefill within the `left_s` that its TTFT deadline leaves, and the other one does, or much sooner, for those who wait."""
    return calm.finish_s > left_s and hurried.finish_s <= max(left_s, calm.finish_s / MUCH)


def choose_way(
    ways: Sequence[Way], itl_s: float, mode: Mode, mode_age_s: float, switch_s: float, dwell: float
) -> tuple[Way, ModeReason]:
    """Of the ways whose ITL bound holds, the one that is predicted to end the most urgent prefill first; of equals, the one
    with the shorter decode step. When none holds, the same among those that miss by little more than the least: to
    prefill nothing helps nobody.

    The mode of the last step stays while it is among them, until it is `dwell` x `switch_s` / gain old: a change that gains
    little must be worth it for long. The gain is the part of the prefill's time that the change saves.
    """
    why = ModeReason.SLACK
    fit = [way for way in ways if way.gap_s.bound_s <= itl_s]
    if not fit:
        why = ModeReason.BEST_EFFORT
        least_s = min(way.gap_s.bound_s for way in ways)
        fit = [way for way in ways if way.gap_s.bound_s <= LITTLE * least_s]
    soon_s = NEAR * min(way.finish_s for way in fit)
    best = min((way for way in fit if way.finish_s <= soon_s), key=lambda way: way.gap_s.predicted_s)
    current = next((way for way in fit if way.mode is mode), best)
    gain = 1 - best.finish_s / current.finish_s
    if current is not best and (gain <= 0 or mode_age_s * gain < dwell * switch_s):
        return current, ModeReason.DWELL
    return best, why
