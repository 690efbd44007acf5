"""What the prefill lane works on next: a job that rests, or a new one of one or several requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pdmux_ray.policy.batching import Room
from pdmux_ray.policy.decisions import Chunk, StepReason
from pdmux_ray.policy.lane_step import LaneStep
from pdmux_ray.policy.sharing import Work
from pdmux_ray.policy.urgency import Entrant, may_overtake, most_urgent_first, resting_order
from pdmux_ray.policy.views import JobView

MOST_SHARED = 16  # requests of one job: each one more is predicted together with all before it


def choose_work(step: LaneStep) -> tuple[Work | None, StepReason | None]:
    """The work, and why nobody new could start when the most urgent one could not. Without predictions nobody is overtaken."""
    if not (step.jobs or step.startable):
        return None, None
    if len(step.jobs) == 1 and not step.startable:
        return _go_on(step.jobs[0]), None
    view, limits, pace, room = step.view, step.limits, step.deciding_pace, step.room()
    resting = resting_order(view, step.jobs, limits.patience_s, pace)
    if resting:
        going_on = _go_on(resting[0][0])
        if pace is None or any(job.overtaken >= limits.overtakes for job, _ in resting):
            return going_on, None
    first, entrants, blocked = first_entrant(step, room)
    if first is None:
        return (going_on if resting else None), blocked
    if not resting:
        return _begin(_share(step, first, entrants, room)), blocked
    assert pace is not None
    # Several that overtake as one job count once.
    for members in (_share(step, first, entrants, room), [first]):
        new_s = pace([member.piece for member in members], view.layers)
        if may_overtake(view.now, new_s, first.request.ttft_deadline_s, resting, limits.overtakes):
            return _begin(members), blocked
    return going_on, blocked


def first_entrant(step: LaneStep, room: Room) -> tuple[Entrant | None, Iterator[Entrant], StepReason | None]:
    """The most urgent request, for which room has been taken, and those after it. When there is no room for it, nobody else
    takes any either, or it might wait for ever: then the most urgent one that needs none, and why."""
    view, patience_s, pace = step.view, step.limits.patience_s, step.deciding_pace
    entrants = most_urgent_first(view, step.startable, patience_s, pace)
    first = next(entrants, None)
    if first is None:
        return None, entrants, None
    blocked = take_room(first, room)
    if blocked is not None:
        holders = [request for request in step.startable if request.held_pages]
        entrants = most_urgent_first(view, holders, patience_s, pace)
        first = next(entrants, None)
    return first, entrants, blocked


def _share(step: LaneStep, first: Entrant, others: Iterator[Entrant], room: Room) -> list[Entrant]:
    """The members of a new job: `first`, and the next ones while all fit the predicted time and nobody in it is late for it."""
    view, limits, pace = step.view, step.limits, step.deciding_pace
    members, pieces = [first], [first.piece]
    tokens, due_s = first.piece.new_tokens, math.inf
    if pace is not None:
        due_s = _binding(first, view.now + pace(pieces, view.layers))
    for other in others:
        tokens += other.piece.new_tokens
        if tokens > limits.max_prefill_tokens or len(members) == MOST_SHARED:
            break
        if pace is not None:
            joint_s = pace([*pieces, other.piece], view.layers)
            if joint_s > limits.share_s or view.now + joint_s > due_s:
                break
            due_s = min(due_s, _binding(other, view.now + joint_s))
        if take_room(other, room) is not None:
            break
        members.append(other)
        pieces.append(other.piece)
    return members


def _binding(member: Entrant, ends_s: float) -> float:
    """A deadline that can be kept; one that is lost binds nobody."""
    due_s = member.request.ttft_deadline_s
    return due_s if due_s >= ends_s else math.inf


def take_room(member: Entrant, room: Room) -> StepReason | None:
    """Takes pages and a place unless it holds them; why there is not enough, and then nothing is taken."""
    return None if member.hit is None else room.take(member.request, member.hit)


def chunk_of(member: Entrant, tokens: int) -> Chunk:
    """The first `tokens` of what is left to prefill."""
    return Chunk(member.request.request_id, member.piece.prior_tokens, tokens)


def _begin(members: Sequence[Entrant]) -> Work:
    chunks = tuple([chunk_of(member, member.piece.new_tokens) for member in members])
    due_s = min([member.request.ttft_deadline_s for member in members])
    return Work(None, chunks, [member.piece for member in members], 0, due_s)


def _go_on(job: JobView) -> Work:
    return Work(job, (), job.pieces, job.layers_done, min([request.ttft_deadline_s for request in job.requests]))
