"""Which instance serves a request, and where it is prefilled. Only instances that are fit are given any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from pdmux_ray.policy.decisions import RouteChoice, RouteReason, Unfit
from pdmux_ray.policy.route_times import Prediction, predictions
from pdmux_ray.policy.views import InstanceCosts, InstanceView
from pdmux_ray.types import Role, RoutePolicy

if TYPE_CHECKING:
    from random import Random

NEAR = 0.1  # ways that are so little above the cheapest are as good: predictions are no better
MOST_PEERS = 2  # that a request is given to fetch from: one, and another when that one fails


@dataclass(frozen=True, slots=True)
class FitnessLimits:
    """When an instance is given no more requests."""

    silence_s: float
    stall_timeout_s: float


def stalled(step_age_s: float, stall_timeout_s: float) -> bool:
    """The stall rule, for an engine and for those who watch it: a step has been under way for longer than the timeout."""
    return step_age_s > stall_timeout_s


def unfit(view: InstanceView, limits: FitnessLimits) -> Unfit | None:
    """Why the instance is given no requests; None when it is."""
    if not view.line_is_up:
        return Unfit.NO_LINE
    if view.silence_s > limits.silence_s:
        return Unfit.SILENT
    if view.step_age_s and stalled(view.step_age_s + view.silence_s, limits.stall_timeout_s):
        return Unfit.STALLED
    if view.ailing:
        return Unfit.AILING
    return Unfit.LEAVING if view.leaving else None


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """A request, as far as its route depends on it."""

    prompt_tokens: int
    cached: Mapping[str, int]  # instance id -> leading prompt tokens that its prefix cache is thought to have; none: 0

    def to_fetch(self, instance_id: str) -> int:
        """Tokens whose KV another instance could give it: all that it lacks but the last one, which it computes."""
        return max(self.prompt_tokens - 1 - self.cached.get(instance_id, 0), 0)


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """How routes are chosen. Times in seconds."""

    fitness: FitnessLimits
    policy: RoutePolicy
    threshold_tokens: int  # policy threshold: with so many to fetch, or more, they are fetched
    ttft_s: float  # objectives; infinite when there is none
    ttft_s_per_token: float
    itl_s: float
    page_size: int  # tokens
    kv_bytes_per_token: int  # of all layers
    bandwidth: float  # of a transfer, bytes a second


def choose_route(
    ask: RouteAsk, views: Sequence[InstanceView], limits: RouteLimits, costs: Mapping[str, InstanceCosts], rng: Random
) -> RouteChoice:
    """Which instance decodes, and from which ones of role PREFILL it fetches the prompt's KV.

    Never an instance that is unfit; none fetches from itself; none at all only when none is fit. `costs` of each instance that
    has a latency model.
    """
    decoders, peers = sides(views, limits.fitness)
    if not decoders and not peers:
        return RouteChoice(None, RouteReason.NONE_FIT if views else RouteReason.NONE_LINKED)
    if not decoders:
        return replace(_least_loaded(ask, peers, rng), reason=RouteReason.NO_DECODE_FIT)
    if limits.policy == "predict" and all(view.instance_id in costs for view in (*decoders, *peers)):
        expected = any(view.role is not Role.MUX for view in views)
        return _by_prediction(ask, decoders, peers, expected, limits, costs, rng)
    return _by_rule(ask, decoders, peers, limits, rng)


def sides(views: Sequence[InstanceView], limits: FitnessLimits) -> tuple[list[InstanceView], list[InstanceView]]:
    """Those fit that may decode, and those fit to fetch from. Who only decodes, and reaches nobody, is for when there is no
    other."""
    fit = [view for view in views if unfit(view, limits) is None]
    peers = [view for view in fit if view.role is Role.PREFILL]
    decoders = [view for view in fit if view.role is not Role.PREFILL]
    return [view for view in decoders if view.role is Role.MUX or any(map(view.reaches, peers))] or decoders, peers


def _by_prediction(
    ask: RouteAsk,
    decoders: Sequence[InstanceView],
    peers: Sequence[InstanceView],
    expected: bool,
    limits: RouteLimits,
    costs: Mapping[str, InstanceCosts],
    rng: Random,
) -> RouteChoice:
    """The cheapest way that keeps the objectives. When none does, one whose prefill delays others least: it is late anyhow, and
    they need not be. Nor does a long prompt hold up short ones where it would decode, while it can be fetched at all: with more
    of both than a fleet can carry, the few long ones wait for a prefill instance.

    Of those that are nearly as cheap one is drawn, so that not all gateways take the same one, nor all of a burst the one that
    has their prefix; a fetch is worth more than that.

    `expected`: there should be prefill instances.
    """
    found = list(predictions(ask, decoders, peers, limits, costs))
    bearable = [way for way in found if way.bearable] or found
    ways = [way for way in bearable if way.keeps] or _nearly_least(bearable, lambda way: way.prefill_s)
    near = _nearly_least(ways, lambda way: way.cost)
    chosen = rng.choice([way for way in near if way.prefill is None] or near)
    view = next(view for view in decoders if view.instance_id == chosen.decode)
    if ask.to_fetch(chosen.decode) and expected and not any(map(view.reaches, peers)):
        reason = RouteReason.NO_PREFILL_FIT
    elif len(decoders) == 1 and not peers:
        reason = RouteReason.ONLY_ONE
    else:
        reason = _reason(chosen, bool(peers) and not ask.to_fetch(chosen.decode))
    return RouteChoice(chosen.decode, reason, _backed(chosen, ways), chosen.ttft_s)


def _nearly_least(ways: Sequence[Prediction], key: Callable[[Prediction], float]) -> list[Prediction]:
    most = (1 + NEAR) * min(map(key, ways))
    return [way for way in ways if key(way) <= most]


def _reason(way: Prediction, cached: bool) -> RouteReason:
    if cached:
        return RouteReason.CACHED
    if not way.keeps:
        return RouteReason.LATE
    return RouteReason.LOCAL if way.prefill is None else RouteReason.REMOTE


def _backed(way: Prediction, ways: Sequence[Prediction]) -> tuple[str, ...]:
    """The way's prefill instance, and the next best ones to try when it fails."""
    if way.prefill is None:
        return ()
    others = sorted((other for other in ways if other.decode == way.decode), key=lambda other: other.ttft_s)
    names = [way.prefill, *(other.prefill for other in others if other.prefill not in (None, way.prefill))]
    return tuple(name for name in names[:MOST_PEERS] if name is not None)


def _by_rule(
    ask: RouteAsk, decoders: Sequence[InstanceView], peers: Sequence[InstanceView], limits: RouteLimits, rng: Random
) -> RouteChoice:
    """The least loaded instance decodes, and the policy says whether it fetches."""
    choice = _least_loaded(ask, decoders, rng)
    view = next(view for view in decoders if view.instance_id == choice.instance_id)
    to_fetch = ask.to_fetch(view.instance_id)
    fetches, reason = _fetches(limits, view, to_fetch)
    if reason is None:
        return choice
    if not fetches:
        return replace(choice, reason=reason)
    reached = [peer for peer in peers if view.reaches(peer)]
    if not to_fetch:
        return replace(choice, reason=RouteReason.CACHED)
    if not reached:
        return replace(choice, reason=RouteReason.NO_PREFILL_FIT)
    return replace(choice, reason=reason, prefill=_least_queued(ask, reached, rng))


def _fetches(limits: RouteLimits, view: InstanceView, to_fetch: int) -> tuple[bool, RouteReason | None]:
    """The rule, and its reason; None when what counts is why the instance decodes."""
    decodes_only = view.role is Role.DECODE
    match limits.policy:
        case "local":
            return False, None
        case "remote":
            return True, RouteReason.ALWAYS
        case "predict":
            return decodes_only, RouteReason.NO_MODEL
        case "threshold":
            if to_fetch >= limits.threshold_tokens:
                return True, RouteReason.LONG
            return decodes_only, RouteReason.ALWAYS if decodes_only else RouteReason.SHORT
        case _:
            assert_never(limits.policy)


def _least_loaded(ask: RouteAsk, fit: Sequence[InstanceView], rng: Random) -> RouteChoice:
    """Least requests first, then most of the prompt cached, then most free pages; equals are drawn."""
    if len(fit) == 1:
        return RouteChoice(fit[0].instance_id, RouteReason.ONLY_ONE)
    fewest = _least(fit, lambda view: view.running + view.waiting + view.on_their_way)
    cached = _least(fewest, lambda view: -ask.cached.get(view.instance_id, 0))
    equals = _least(cached, lambda view: -view.free_pages)
    if len(equals) > 1:
        return RouteChoice(rng.choice(equals).instance_id, RouteReason.TIE)
    by_prefix = len(cached) < len(fewest)
    return RouteChoice(equals[0].instance_id, RouteReason.PREFIX if by_prefix else RouteReason.LEAST_LOADED)


def _least_queued(ask: RouteAsk, peers: Sequence[InstanceView], rng: Random) -> tuple[str, ...]:
    """Those with the fewest tokens to compute until this prompt is done, best first."""

    def tokens(view: InstanceView) -> int:
        return view.queued_prefill_tokens + view.on_their_way_tokens - ask.cached.get(view.instance_id, 0)

    return tuple(view.instance_id for view in sorted(rng.sample(peers, len(peers)), key=tokens)[:MOST_PEERS])


def _least(views: Sequence[InstanceView], key: Callable[[InstanceView], int]) -> list[InstanceView]:
    best = min(map(key, views))
    return [view for view in views if key(view) == best]
