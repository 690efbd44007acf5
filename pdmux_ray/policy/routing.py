"""Which instance serves a request: the one with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.policy.views import InstanceView


def choose_instance(views: Sequence[InstanceView], rng: Random) -> RouteChoice | None:
    """Least requests first, then most free pages; equals are drawn with `rng`. None when there is no instance."""
    if not views:
        return None
    if len(views) == 1:
        return RouteChoice(views[0].instance_id, RouteReason.ONLY_ONE)
    best = min(map(_cost, views))
    equals = [view for view in views if _cost(view) == best]
    if len(equals) == 1:
        return RouteChoice(equals[0].instance_id, RouteReason.LEAST_LOADED)
    return RouteChoice(rng.choice(equals).instance_id, RouteReason.TIE)


def _cost(view: InstanceView) -> tuple[int, int]:
    return (view.running + view.waiting + view.on_their_way, -view.free_pages)
