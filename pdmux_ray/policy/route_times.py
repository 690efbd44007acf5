"""When a request's first token would come, and what it would do to gaps between tokens, on every way it could take.

    local    T = queue + own
    fetched  T = queue + own of the prefill instance, its own part beside the transfer, then D's next decode step

With lanes, `queue` and `own` are prefills on the whole device over the share of it that the decodes leave: an engine keeps its
ITL objective, so that of each such interval a prefill gets what is not one decode step. In one pass they are steps that decode,
too. A push follows the layers, so the longer one of computing and pushing counts, and one layer of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdmux_ray.policy.views import Estimate, InstanceCosts, InstanceView, Piece
from pdmux_ray.types import Role

if TYPE_CHECKING:
    from pdmux_ray.policy.routing import RouteAsk, RouteLimits

QUEUE_PIECE = 512  # tokens: what is queued and not known is thought to be made of such prompts, whatever their number
SAFE = 1.2  # a first token is in time when it would be even if it took so many times what is predicted
LEAST_SHARE = 0.1  # of the device, for a prefill beside decodes that take all that the objective allows
HANDOFF_S = 0.005  # messages of one transfer, until both ends have begun


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one way: decoded there, prefilled by `prefill` (None: where it is decoded)."""

    decode: str
    prefill: str | None
    ttft_s: float
    used: float  # of what the TTFT objective allows; 0 without one
    prefill_s: float  # of these, from its begin to its end: so long others wait for it
    gap_s: float  # 99 % bound of the decode instance's steps when it and all that are due there decode
    bearable: bool  # it could be in time if nothing were queued, and is not so long that short ones behind it would be late
    keeps: bool  # both objectives, with pages for its prompt now: without, it would wait for who knows how long
    cost: float  # the sum of both in objectives


class _Prefill(NamedTuple):
    queue_s: float
    own_s: float
    step_s: float  # 99 % bound of the longest step that it makes others wait for; 0 with lanes, or when nobody decodes
    room: bool


def predictions(
    ask: RouteAsk,
    decoders: Sequence[InstanceView],
    peers: Sequence[InstanceView],
    limits: RouteLimits,
    costs: Mapping[str, InstanceCosts],
) -> Iterator[Prediction]:
    """Every way: each of `decoders` with each of `peers` that it reaches, and alone, unless it only decodes and reaches one."""
    exports = [(peer, _prefill(ask.prompt_tokens - 1, peer, ask, limits, costs[peer.instance_id])) for peer in peers]
    for view in decoders:
        own, missing = costs[view.instance_id], ask.to_fetch(view.instance_id)
        local = _prefill(ask.prompt_tokens, view, ask, limits, own)
        gap_s = _gap_s(ask, view, own)
        reached = [export for export in exports if missing and view.reaches(export[0])]
        if view.role is not Role.DECODE or not reached:
            yield _judged(ask, (view, None), local, local.queue_s + local.own_s, max(gap_s, local.step_s), limits)
        transfer_s = missing * limits.kv_bytes_per_token / limits.bandwidth
        for peer, there in reached:
            short_s, long_s = sorted((there.own_s, transfer_s))
            landed_s = there.queue_s + long_s + short_s / costs[peer.instance_id].layers
            ttft_s = landed_s + HANDOFF_S + _first_step_s(ask, view, own)
            export = there._replace(room=there.room and local.room)
            yield _judged(ask, (view, peer), export, ttft_s, gap_s, limits)


def _judged(
    ask: RouteAsk,
    way: tuple[InstanceView, InstanceView | None],
    prefill: _Prefill,
    ttft_s: float,
    gap_s: float,
    limits: RouteLimits,
) -> Prediction:
    decode, peer = way
    used = ttft_s / _allowed_s(ask, limits)
    keeps = prefill.room and SAFE * used <= 1 and gap_s <= limits.itl_s
    cost = (used or ttft_s) + gap_s / limits.itl_s
    peer_id = None if peer is None else peer.instance_id
    bearable = SAFE * (ttft_s - prefill.queue_s) <= _allowed_s(ask, limits)
    bearable &= peer is not None or SAFE * prefill.own_s <= limits.ttft_s
    return Prediction(decode.instance_id, peer_id, ttft_s, used, prefill.own_s, gap_s, bearable, keeps, cost)


def _allowed_s(ask: RouteAsk, limits: RouteLimits) -> float:
    return limits.ttft_s + limits.ttft_s_per_token * ask.prompt_tokens


def _prefill(tokens: int, view: InstanceView, ask: RouteAsk, limits: RouteLimits, costs: InstanceCosts) -> _Prefill:
    """Of the first `tokens` of the prompt, after all that is queued there and goes before it."""
    piece = _piece(tokens, view, ask)
    ahead, rest = _queue(view, _allowed_s(ask, limits), costs)
    pages = -(-(tokens + 1) // limits.page_size) - piece.prior_tokens // limits.page_size
    room = pages <= view.free_pages
    if costs.one_pass_tokens is None:
        share = _share(view, limits, costs)
        queue_s = _alone_s(Piece(QUEUE_PIECE, 0), costs) * rest / QUEUE_PIECE
        queue_s += sum([_alone_s(Piece(tokens, 0), costs) for tokens in ahead])
        return _Prefill(queue_s / share, _alone_s(piece, costs) / share, 0.0, room)
    chunk = int(min(QUEUE_PIECE, costs.one_pass_tokens))
    queue_s = _pass(Piece(chunk, 0), view, costs).predicted_s * (sum(ahead) + rest) / chunk
    chunk = int(min(piece.new_tokens, costs.one_pass_tokens))
    step = _pass(Piece(chunk, piece.prior_tokens + (piece.new_tokens - chunk) // 2), view, costs)  # one amid its steps
    own_s = step.predicted_s * math.ceil(piece.new_tokens / chunk)
    return _Prefill(queue_s, own_s, step.bound_s if view.decode_batch else 0.0, room)


def _queue(view: InstanceView, left_s: float, costs: InstanceCosts) -> tuple[list[int], int]:
    """What goes before a prompt whose first token is due in `left_s`: known prompts, and tokens of others.

    With lanes that is what is due before it, but for what is late already, which lets others pass; in one pass it is whatever
    has come before."""
    by_arrival = costs.one_pass_tokens is not None
    ahead = [queued.tokens for queued in view.queue if by_arrival or 0 <= queued.left_s <= left_s]
    known = sum([queued.tokens for queued in view.queue])
    return ahead, max(view.queued_prefill_tokens + max(view.on_their_way_tokens - known, 0) - known, 0)


def _share(view: InstanceView, limits: RouteLimits, costs: InstanceCosts) -> float:
    """Of the device, for prefills."""
    if not view.decode_batch:
        return 1.0
    decode = costs.model.decode(view.decode_batch, view.decode_context_tokens, costs.units, 0)
    return max(1.0 - decode.bound_s / limits.itl_s, LEAST_SHARE)


def _pass(piece: Piece, view: InstanceView, costs: InstanceCosts) -> Estimate:
    """A step that decodes and prefills."""
    return costs.model.mixed(view.decode_batch, view.decode_context_tokens, (piece,), costs.units)


def _gap_s(ask: RouteAsk, view: InstanceView, costs: InstanceCosts) -> float:
    batch = view.running + view.waiting + view.on_their_way + 1
    context = view.decode_context_tokens + view.queued_prefill_tokens + view.on_their_way_tokens + ask.prompt_tokens
    return costs.model.decode(batch, context, costs.units, 0).bound_s


def _first_step_s(ask: RouteAsk, view: InstanceView, costs: InstanceCosts) -> float:
    """From the last byte to the first token: the step under way is half over, on average, and then comes its own."""
    batch, context = view.decode_batch + 1, view.decode_context_tokens + ask.prompt_tokens
    step_s = costs.model.decode(batch, context, costs.units, 0).predicted_s
    return 1.5 * step_s if view.decode_batch else step_s


def _alone_s(piece: Piece, costs: InstanceCosts) -> float:
    return costs.model.prefill((piece,), costs.layers, costs.units, 0, last=True).predicted_s


def _piece(tokens: int, view: InstanceView, ask: RouteAsk) -> Piece:
    """What an instance has to compute of them: the last one always."""
    cached = min(ask.cached.get(view.instance_id, 0), tokens - 1)
    return Piece(tokens - max(cached, 0), max(cached, 0)) if tokens > 0 else Piece(1, 0)
