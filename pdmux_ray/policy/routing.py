"""Which instance serves a request, and where it is prefilled. Only instances that are fit are given any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pdmux_ray.policy.decisions import RouteChoice, RouteReason, Unfit
from pdmux_ray.policy.views import InstanceCosts, InstanceView
from pdmux_ray.types import Role

if TYPE_CHECKING:
    from random import Random


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


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """How routes are chosen. Times in seconds."""

    fitness: FitnessLimits
    policy: Literal["predict", "threshold", "local", "remote"]
    threshold_tokens: int  # policy threshold: with so many left to prefill, or more, the KV is fetched
    ttft_s: float  # objectives; infinite when there is none
    ttft_s_per_token: float
    itl_s: float
    page_size: int  # tokens
    kv_bytes_per_token: int  # of all layers
    bandwidth: float  # of a transfer, bytes a second


def choose_route(
    ask: RouteAsk, views: Sequence[InstanceView], limits: RouteLimits, costs: Mapping[str, InstanceCosts], rng: Random
) -> RouteChoice:
    """Never an instance that is unfit; none fetches from itself."""
    decoders = [view for view in views if view.role is not Role.PREFILL]
    return choose_instance(decoders, limits.fitness, rng)


def choose_instance(views: Sequence[InstanceView], limits: FitnessLimits, rng: Random) -> RouteChoice:
    """Among the fit ones, least requests first, then most free pages; equals are drawn with `rng`."""
    if not views:
        return RouteChoice(None, RouteReason.NONE_LINKED)
    fit = [view for view in views if unfit(view, limits) is None]
    if not fit:
        return RouteChoice(None, RouteReason.NONE_FIT)
    if len(fit) == 1:
        return RouteChoice(fit[0].instance_id, RouteReason.ONLY_ONE)
    best = min(map(_cost, fit))
    equals = [view for view in fit if _cost(view) == best]
    if len(equals) == 1:
        return RouteChoice(equals[0].instance_id, RouteReason.LEAST_LOADED)
    return RouteChoice(rng.choice(equals).instance_id, RouteReason.TIE)


def _cost(view: InstanceView) -> tuple[int, int]:
    return (view.running + view.waiting + view.on_their_way, -view.free_pages)
