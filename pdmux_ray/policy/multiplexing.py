"""What the next step of a device with lanes does: who decodes, what the prefill lane is given, how the two share the units.

SPLIT and CAPPED: for every step the fewest decode units whose 99 % bound, with the prefill beside it, meets the ITL objective,
and all others to the prefill. AUTO: see `mode_choice.choose_way`.

lane_step    who can decode, who may start           urgency      whose prompt is due first, who may overtake
jobs         what the prefill lane works on          sharing      each way to share the device, and what it is predicted to do
chunks       CHUNKED by predicted time               mode_choice  which way AUTO takes
look_ahead   how many decode steps at once
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from pdmux_ray.policy.chunks import plan_chunks
from pdmux_ray.policy.decisions import Block, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.jobs import choose_work
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.lane_step import LaneStep, lane_step, mode_in_force
from pdmux_ray.policy.look_ahead import plan_burst
from pdmux_ray.policy.mode_choice import Need, choose_way
from pdmux_ray.policy.sharing import Blocks, Way, Work, beside, chunked, largest_that_fits, time_shared, wait_s
from pdmux_ray.policy.views import CostModel, Estimate, LanesView
from pdmux_ray.types import Mode, Split

LANE_MODES = (Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED)


class Choice(NamedTuple):
    """The way that a step takes."""

    way: Way
    why: ModeReason
    room_s: float  # that the bound of a chunk may take up


def plan_lanes(view: LanesView, limits: LaneLimits, costs: CostModel | None) -> StepPlan:
    """Plans one step. Raises ValueError when there is neither a latency model nor a rule, or when the device has no splits for
    the mode.

    1. Every decode reserves the page it grows into. Too few: requests are preempted, newest first, never those of a block in
       flight, and nobody starts. A job that loses a request has ended; its others begin anew, with the pages they have.
    2. While a block is in flight its units stay its own: the decodes go on with what they have, and wait when that is nothing.
    3. Else the prefill lane is given the next block of the most urgent work; when nobody decodes, on every unit.
    4. The mode is the configured one; what AUTO takes, `mode_choice.choose_way` says.

    The plan may start any waiting request, not only the first one.
    """
    if costs is None and limits.rule is None:
        raise ValueError("without a latency model the units of a step need a rule")
    step = lane_step(view, limits, costs)
    if step.held is not None:
        return _hold(step)
    if limits.mode is Mode.CHUNKED:  # no engine is configured so: how one that only chunks by predicted time would do
        return _chunk(step, ModeReason.CONFIGURED, limits.itl_s)
    work, blocked = choose_work(step)
    if work is None:
        return _decode_alone(step, blocked)
    if not step.decoding:
        return _prefill_alone(step, work)
    if limits.rule is not None:
        return _both(step, _ruled_use(step, work))
    assert costs is not None
    way, why, room_s = _choose(step, work, costs)
    if way.mode is Mode.CHUNKED:
        return _chunk(step, why, room_s)
    patience_s = _patience_s(step, way.mode, way.decode_s)
    return _both(step, LaneUse(way.mode, way.split, why, work.block(way.layers), way.decode_s, way.block_s, patience_s))


def _both(step: LaneStep, use: LaneUse) -> StepPlan:
    """Decodes and a block: the one that `use` launches, or the one in flight. In TIME_SHARED they take turns, step by step."""
    plan, ends_s = _plan(step, StepReason.LANES_BOTH, use), step.held.ends_s if step.held else None
    if use.mode is Mode.TIME_SHARED or step.limits.most_steps == 1:
        return plan
    if use.block_s is not None:
        ends_s = step.view.now + use.block_s.predicted_s
    left = replace(step, free_pages=step.free_pages if use.block is None else _free_after(step, use.block))
    steps, burst = plan_burst(left, use.decode_s, 0.0 if ends_s is None else ends_s - step.view.now)
    return replace(plan, steps=steps, burst=burst)


def _free_after(step: LaneStep, block: Block) -> int:
    """Pages, when those of a new job have theirs."""
    room, begin = step.room(), {chunk.request_id for chunk in block.chunks}
    for request in step.startable:
        if request.request_id in begin and not request.held_pages:
            room.take(request, step.view.prefix_hit(request))
    return room.free_pages


def _choose(step: LaneStep, work: Work, costs: CostModel) -> Choice:
    """The way of the configured mode, or for AUTO of all that are possible the best."""
    view, mode, itl_s = step.view, step.limits.mode, step.limits.itl_s
    if mode is Mode.AUTO:
        return _auto(step, work, costs)
    if mode is Mode.TIME_SHARED:
        way = time_shared(view.units, *_alone(step, work, costs), itl_s)
    else:
        way = beside(costs, view, step.decodes, work, mode, itl_s)
    return Choice(way, ModeReason.FITS if way.gap_s.bound_s <= itl_s else ModeReason.BEST_EFFORT, itl_s)


def _alone(step: LaneStep, work: Work, costs: CostModel) -> tuple[Estimate, Blocks]:
    """The decodes, and what is left of the prefill, each with every unit to itself."""
    units = step.view.units
    return costs.decode(*step.decodes, units, 0), Blocks(costs, work, step.view.layers, units, 0)


def _auto(step: LaneStep, work: Work, costs: CostModel) -> Choice:
    view, limits, prompts = step.view, step.limits, len(work.pieces)
    decode_s, blocks = _alone(step, work, costs)
    need = Need(
        itl_s=limits.itl_s,
        left_s=work.due_s - view.now,
        decode_s=decode_s.predicted_s,
        prefill_s=blocks.whole.predicted_s,
        decodes=step.decodes.batch,
        prompts=prompts,
        others=len(step.startable) - (prompts if work.job is None else 0),
        waited_s=max(view.now - min([request.token_s for request in step.decoding]), 0.0),
    )
    ways = _in_turns(view.units, decode_s, blocks, need.itl_s) + _others(step, work, costs, need)
    way, why = choose_way(ways, need, view.mode, view.now - view.mode_since_s, costs.switch_s, limits.dwell)
    return Choice(way, why, max(need.room_s(way), way.gap_s.bound_s))


def _in_turns(units: int, decode_s: Estimate, blocks: Blocks, itl_s: float) -> list[Way]:
    """TIME_SHARED, cut to fit the objective, and also whole."""
    way = time_shared(units, decode_s, blocks, itl_s)
    return [way] if way.layers == blocks.left else [way, time_shared(units, decode_s, blocks, math.inf)]


def _others(step: LaneStep, work: Work, costs: CostModel, need: Need) -> list[Way]:
    """All that are possible. CHUNKED also whole. See `Need.room_s`."""
    view, decodes, room_s, ways = step.view, step.decodes, need.itl_s - need.waited_s, list[Way]()
    if view.splits:
        ways += [beside(costs, view, decodes, work, mode, room_s) for mode in (Mode.SPLIT, Mode.CAPPED)]
    if not step.jobs:  # a job's layers cannot become chunks
        most_tokens = step.limits.max_prefill_tokens
        ways.append(chunked(costs, view, decodes, work, room_s, most_tokens))
        if ways[-1].finish_s > ways[-1].gap_s.predicted_s:
            ways.append(chunked(costs, view, decodes, work, math.inf, most_tokens))
    return ways


def _ruled_use(step: LaneStep, work: Work) -> LaneUse:
    """Units and layers by the rule; predictions, where there are any, only say what to expect."""
    view, mode, rule = step.view, step.limits.mode, step.limits.rule
    assert rule is not None
    split, layers = rule.choose(step.decodes.batch, work.new_tokens, view.layers)
    layers = min(layers, view.layers - work.layers_done)
    if mode is Mode.CAPPED:
        split = Split(split.prefill_units, view.units)
    elif mode is Mode.TIME_SHARED:
        split = Split(view.units, view.units)
    decode_s = block_s = None
    if step.costs is not None:
        at_once = mode is not Mode.TIME_SHARED
        decode_s = step.costs.decode(*step.decodes, split.decode_units, split.prefill_units * at_once)
        last = work.layers_done + layers == view.layers
        block_s = step.costs.prefill(work.pieces, layers, split.prefill_units, split.decode_units * at_once, last=last)
    return LaneUse(mode, split, rule.reason, work.block(layers), decode_s, block_s)


def _hold(step: LaneStep) -> StepPlan:
    """A block is in flight."""
    mode, split = step.view.mode, step.view.split
    waits = not split.decode_units or mode is Mode.TIME_SHARED
    if not step.decoding or waits:
        return replace(_plan(step, StepReason.LANES_PREFILL, LaneUse(mode, split, ModeReason.HELD)), decode=())
    decode_s = None
    if step.costs is not None:
        decode_s = step.costs.decode(*step.decodes, split.decode_units, split.prefill_units)
    use = LaneUse(mode, split, ModeReason.HELD, None, decode_s, None, _patience_s(step, mode, decode_s))
    return _both(step, use)


def _patience_s(step: LaneStep, mode: Mode, decode_s: Estimate | None) -> float:
    """How long the step may wait for its block. A published rule does not wait."""
    if mode is Mode.TIME_SHARED or decode_s is None or step.limits.rule is not None:
        return 0.0
    return wait_s(decode_s, step.limits.itl_s)


def _prefill_alone(step: LaneStep, work: Work) -> StepPlan:
    view, limits, costs = step.view, step.limits, step.costs
    units, left = view.units, view.layers - work.layers_done
    blocks = None if costs is None else Blocks(costs, work, view.layers, units, 0)
    if limits.rule is not None:
        layers = min(limits.rule.choose(0, work.new_tokens, view.layers)[1], left)
    else:
        assert blocks is not None
        guess = left * limits.idle_block_s / blocks.whole.predicted_s
        layers = largest_that_fits(lambda layers: blocks[layers].predicted_s <= limits.idle_block_s, left, guess)
    block_s = None if blocks is None else blocks[layers]
    use = LaneUse(_lane_mode(step), Split(units, 0), ModeReason.NO_DECODE, work.block(layers), None, block_s)
    return _plan(step, StepReason.LANES_PREFILL, use)


def _decode_alone(step: LaneStep, blocked: StepReason | None) -> StepPlan:
    """Nobody can be prefilled. A step of every unit in one pass is the same as one of the whole decode lane."""
    if not step.decoding:
        return _plan(step, StepReason.IDLE, None)
    units = step.view.units
    decode_s = None if step.costs is None else step.costs.decode(*step.decodes, units, 0)
    reason = blocked or StepReason.DECODE_ONLY
    if mode_in_force(step.view, step.limits) is Mode.CHUNKED:
        plan = replace(_plan(step, reason, None), why=ModeReason.NO_PREFILL, step_s=decode_s)
    else:
        plan = _plan(step, reason, LaneUse(_lane_mode(step), Split(0, units), ModeReason.NO_PREFILL, None, decode_s))
    steps, burst = plan_burst(step, decode_s)
    return plan if burst is None else replace(plan, steps=steps, burst=burst)


def _chunk(step: LaneStep, why: ModeReason, room_s: float) -> StepPlan:
    chunks, step_s, blocked = plan_chunks(step, room_s)
    if not chunks:
        return _decode_alone(step, blocked)
    reason = StepReason.CHUNK_MIXED if step.decoding else StepReason.CHUNK_ONLY
    return replace(_plan(step, reason, None), prefill=chunks, why=why, step_s=step_s)


def _plan(step: LaneStep, reason: StepReason, lanes: LaneUse | None) -> StepPlan:
    """Everyone decodes."""
    return StepPlan(
        reason=StepReason.PREEMPT if step.preempted and reason is not StepReason.IDLE else reason,
        decode=tuple([request.request_id for request in step.decoding]),
        preempt=tuple([request.request_id for request in step.preempted]),
        lanes=lanes,
    )


def _lane_mode(step: LaneStep) -> Mode:
    """The mode that a step of one lane counts to: the one in force, so that AUTO does not change it for nothing."""
    mode = mode_in_force(step.view, step.limits)
    return mode if mode in LANE_MODES else Mode.TIME_SHARED
