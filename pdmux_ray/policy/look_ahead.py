"""How many decode steps the device is given at once: a burst.

It computes them one after the other without the host, each from the tokens of the one before, so it does not stand idle while
the host looks at what came and plans what is next. What a burst costs: whoever comes in its midst waits for its end, and what
is computed for a request after its last token is for nothing.

Beside a block of a prefill nobody can begin before the block ends, so a burst until then makes nobody wait. Most blocks are as
long as one step, and leave no room for more: longer ones would let no prompt begin or overtake for as long.

`steps_alike` is about something else: steps that are planned one by one, and which a simulator may take at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pdmux_ray.policy.batching import pages_to_grow
from pdmux_ray.policy.decisions import BurstReason
from pdmux_ray.policy.lane_step import LaneStep
from pdmux_ray.policy.sharing import largest_that_fits
from pdmux_ray.policy.views import EngineView, Estimate, RequestView


def plan_burst(step: LaneStep, step_s: Estimate | None, beside_s: float | None = None) -> tuple[int, BurstReason | None]:
    """Of a step in which everyone decodes: `step_s` is what one is predicted to take, `beside_s` in how many seconds the block
    beside it is predicted to end; None: there is none. No reason, when there is no choice because the device takes one step at
    a time.

    One step while anybody could decode with the next one, or the host samples. Else as many as the device takes, but
    - none goes on when the block has ended: what follows it must not wait;
    - no request gets a step after the one that is certainly its last. So nothing is written beyond its context, and only a stop
      that nobody could foresee leaves tokens to be thrown away;
    - who comes meanwhile is looked at no later than beside a block on an idle device (`LaneLimits.idle_block_s`);
    - their pages are free or cached now: nobody is preempted for a step that is not due yet.
    """
    view, limits = step.view, step.limits
    if limits.most_steps == 1:
        return 1, None
    if step.preempted or view.transferring or (beside_s is None and (view.waiting or view.prefilling)):
        return 1, BurstReason.JOINS
    if any([request.host_sampled for request in step.decoding]):
        return 1, BurstReason.HOST
    if step_s is None:
        return 1, BurstReason.NO_MODEL
    bounds = (
        (limits.most_steps, BurstReason.FULL),
        (_steps_to_first_end(step.decoding, view.now, step_s.predicted_s), BurstReason.ENDS),
        (_steps_within(limits.idle_block_s, step_s.predicted_s), BurstReason.ARRIVALS),
        (_steps_within(math.inf if beside_s is None else beside_s, step_s.predicted_s), BurstReason.BLOCK),
    )
    steps, why = min(bounds, key=lambda bound: bound[0])  # of equals the first
    room = step.free_pages + pages_to_grow(step.decoding, view.page_size)
    roomy = largest_that_fits(lambda steps: pages_to_grow(step.decoding, view.page_size, steps) <= room, steps)
    return (roomy, BurstReason.PAGES) if roomy < steps else (steps, why)


def _steps_to_first_end(decoding: Sequence[RequestView], now: float, step_s: float) -> int:
    """Until one of these ends for certain, by its last token or by its deadline; at least one."""
    left_tokens = min([request.left_tokens for request in decoding])
    deadline_s = min([math.inf if request.deadline_s is None else request.deadline_s for request in decoding])
    return min(left_tokens, _steps_within(deadline_s - now, step_s))


def _steps_within(seconds: float, step_s: float) -> int:
    """At least one; very many when there is no end."""
    return max(int(min(seconds / step_s, 2**31)), 1)


class Alike(NamedTuple):
    """So many steps, each of which begins before then, on the engine's clock."""

    steps: int
    before_s: float


NONE_ALIKE = Alike(0, -math.inf)


def steps_alike(view: EngineView) -> Alike:
    """After a step in which all who decode now decoded, and nothing else was done: how many more are certain to be planned like
    it, with contexts a token longer each, unless something comes. By `plan_step`, and by `plan_lanes` while there is no job.

    Until somebody may end, by a token, a length or a deadline, or pages would have to be taken from somebody.
    """
    decoding = view.decoding
    if not decoding or view.waiting or view.prefilling or view.transferring:
        return NONE_ALIKE
    if any([request.stops_early or request.host_sampled for request in decoding]):
        return NONE_ALIKE
    steps = min([request.left_tokens for request in decoding]) - 1
    before_s = min([math.inf if request.deadline_s is None else request.deadline_s for request in decoding])
    if steps > 0 and pages_to_grow(decoding, view.page_size, steps) > view.free_pages:
        steps = largest_that_fits(lambda steps: pages_to_grow(decoding, view.page_size, steps) <= view.free_pages, steps)
        steps -= pages_to_grow(decoding, view.page_size, steps) > view.free_pages  # not even one
    return Alike(steps, before_s)
