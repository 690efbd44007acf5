"""Instances as plain data, for routing."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.route_times import Prediction, predictions
from pdmux_ray.policy.routing import FitnessLimits, RouteAsk, RouteLimits, choose_route, sides
from pdmux_ray.policy.views import InstanceCosts, InstanceView
from pdmux_ray.types import Role

PAGE = 16
FITNESS = FitnessLimits(silence_s=5.0, stall_timeout_s=60.0)
WELL = InstanceView(
    "well",
    running=0,
    waiting=0,
    free_pages=1000,
    step_age_s=0.0,
    silence_s=0.5,
    on_their_way=0,
    line_is_up=True,
    leaving=False,
    ailing=False,
)
LIMITS = RouteLimits(
    FITNESS,
    policy="predict",
    threshold_tokens=256,
    ttft_s=1.0,
    ttft_s_per_token=0.002,
    itl_s=0.1,
    page_size=PAGE,
    kv_bytes_per_token=10_000,
    bandwidth=1e9,
)
NO_OBJECTIVES = replace(LIMITS, ttft_s=math.inf, ttft_s_per_token=0.0, itl_s=math.inf)
# A prompt token takes 1 ms, a decode step 10 ms and 1 more for each request; one unit.
COSTS = InstanceCosts(
    FakeCosts(1, 30, fixed_s=0.0, weights_s=0.01, request_s=0.001, context_s=0.0, pair_s=0.0, guard=1.0), 30, 1
)


def mux(name: str, **figures: Any) -> InstanceView:
    return replace(WELL, instance_id=name, **figures)


def prefill(name: str, **figures: Any) -> InstanceView:
    return replace(WELL, instance_id=name, role=Role.PREFILL, **figures)


def decode(name: str, **figures: Any) -> InstanceView:
    return replace(WELL, instance_id=name, role=Role.DECODE, **figures)


def decoding(batch: int) -> dict[str, int]:
    """Figures of an instance on which so many decode."""
    return {"running": batch, "decode_batch": batch, "decode_context_tokens": 100 * batch}


def costs_of(*views: InstanceView, costs: InstanceCosts = COSTS) -> dict[str, InstanceCosts]:
    return {view.instance_id: costs for view in views}


def route(
    tokens: int, *views: InstanceView, limits: RouteLimits = LIMITS, seed: int = 1, cached: dict[str, int] | None = None
) -> RouteChoice:
    return choose_route(RouteAsk(tokens, cached or {}), views, limits, costs_of(*views), Random(seed))


def ways(
    ask: RouteAsk, *views: InstanceView, limits: RouteLimits = LIMITS, costs: InstanceCosts = COSTS
) -> dict[tuple[str, str | None], Prediction]:
    found = predictions(ask, *sides(views, limits.fitness), limits, costs_of(*views, costs=costs))
    return {(way.decode, way.prefill): way for way in found}
