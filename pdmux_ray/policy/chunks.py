"""CHUNKED, with a chunk as long as the ITL objective allows by predicted time: no fixed number of tokens fits every batch."""

from __future__ import annotations

from itertools import chain

from pdmux_ray.policy.decisions import Chunk, StepReason
from pdmux_ray.policy.jobs import chunk_of, first_entrant, take_room
from pdmux_ray.policy.lane_step import LaneStep
from pdmux_ray.policy.sharing import chunk_tokens
from pdmux_ray.policy.views import Estimate, Piece


def plan_chunks(step: LaneStep, itl_s: float) -> tuple[tuple[Chunk, ...], Estimate | None, StepReason | None]:
    """The chunks of a step, what it is predicted to take, and why nobody new could start when somebody could not."""
    room = step.room()
    first, others, blocked = first_entrant(step, room)
    if first is None:
        return (), None, blocked
    costs, limits = step.costs, step.limits
    assert costs is not None
    budget, _ = chunk_tokens(costs, step.view, step.decodes, limits.max_prefill_tokens, first.piece.prior_tokens, itl_s)
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    for member in chain([first], others):
        if member is not first and take_room(member, room) is not None:
            break
        tokens = min(member.piece.new_tokens, budget)
        chunks.append(chunk_of(member, tokens))
        pieces.append(Piece(tokens, member.piece.prior_tokens))
        budget -= tokens
        if budget == 0:
            break
    step_s = costs.mixed(*step.decodes, pieces, step.view.units)
    while len(pieces) > 1 and step_s.bound_s > itl_s:  # the others look back farther than the first one does
        chunks.pop()
        pieces.pop()
        step_s = costs.mixed(*step.decodes, pieces, step.view.units)
    return tuple(chunks), step_s, blocked
