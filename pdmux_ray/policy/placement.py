"""Which instances of a fleet prefill, and how many instances there should be. Pure.

A ratio is as good as its busier side is idle: load(x) = max(prefill / x, decode / (n - x)), where x of n instances prefill.
Roles change to the ratio with the least load, but only when the present one is busy, when the other one is better by a margin,
when it has been so for some time, and when no change the other way is too recent. So neither noise nor a load that stays moves
anything: to come back, the load must have changed by more than the margin. Without fresh figures nothing is done.

It never looks at what was planned: an instance has the role that it says it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmux_ray.policy.decisions import PlacementPlan, PlacementReason
from pdmux_ray.policy.demand import Demand
from pdmux_ray.types import Role

MIXED = 1.2  # of a device that does all of both phases: a prefill disturbs decodes, and the other way round


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance as the controller sees it."""

    instance_id: str
    role: Role
    busy: int = 0  # requests that it has: of several, those with the fewest change
    fit: bool = True  # others are counted nowhere, and left alone
    pinned: Role | None = None
    requested: Role | None = None  # that it was given, and has not taken yet


@dataclass(frozen=True, slots=True)
class PlacementView:
    """`demand`: None when nobody knows the figures."""

    now: float
    instances: Sequence[PlacedInstance]
    demand: Demand | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Both included."""

    least: int
    most: float = math.inf

    def hold(self, count: int) -> bool:
        return self.least <= count <= self.most


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """What the operator allows, and how sure it must be. Times in seconds. The defaults are those of `config_placement`."""

    prefill: Bounds  # instances in role prefill
    decode: Bounds  # all others
    decode_role: Role  # what those get
    replicas: Bounds | None  # instances in all, at most a finite number; None: their number is not its business
    busy: float  # a load: up to it the roles stay as they are
    margin: float  # by this part of it another ratio must have less load
    confirm_s: float  # for which it must
    cool_down_s: float  # between a change and one that goes back
    stale_s: float  # older figures count as none


@dataclass(frozen=True, slots=True)
class PlacementMemory:
    """What it keeps from one look to the next. One that begins anew waits as after a change."""

    changed_s: float  # when roles were changed last, or it began
    direction: int = 0  # of that change, as `leaning`; 0: of neither kind
    leaning: int = 0  # 1: to more prefill instances, -1: to fewer, 0: to neither
    since_s: float = 0.0  # when it began to lean so


def place(view: PlacementView, memory: PlacementMemory, limits: PlacementLimits) -> tuple[PlacementPlan, PlacementMemory]:
    """The plan, and what to remember of it."""
    fit = [instance for instance in view.instances if instance.fit]
    steady = replace(memory, leaning=0)
    if any(instance.requested not in (None, instance.role) for instance in fit):
        return _plan(PlacementReason.PENDING, view, limits), steady
    if changes := _pins(fit):
        return _plan(PlacementReason.PINNED, view, limits, changes), PlacementMemory(view.now)
    if len(fit) < 2:
        return _plan(PlacementReason.FEW, view, limits), steady
    reason, more = _wanted(fit, view, limits)
    if not more:
        return _plan(reason, view, limits), steady
    leaning = 1 if more > 0 else -1
    memory = memory if memory.leaning == leaning else replace(memory, leaning=leaning, since_s=view.now)
    moved = _moved(fit, more, limits)
    if view.now - memory.since_s < limits.confirm_s:
        return _plan(PlacementReason.CONFIRMING, view, limits, later=moved), memory
    if leaning != memory.direction and view.now - memory.changed_s < limits.cool_down_s:
        return _plan(PlacementReason.COOLING, view, limits, later=moved), memory
    return _plan(reason, view, limits, moved), PlacementMemory(view.now, direction=leaning)


def _wanted(fit: Sequence[PlacedInstance], view: PlacementView, limits: PlacementLimits) -> tuple[PlacementReason, int]:
    """How many more instances should prefill (below 0: fewer), and why."""
    present, allowed, demand = sum(each.role is Role.PREFILL for each in fit), _allowed(fit, limits), view.demand
    if present not in allowed:
        nearest = min(allowed, key=lambda count: abs(count - present))
        return PlacementReason.BOUNDS, nearest - present
    if demand is None or not fresh(demand, view.now, limits):
        return PlacementReason.STALE, 0
    loads = {count: _load(demand, count, len(fit)) for count in allowed}
    if loads[present] <= limits.busy:
        return PlacementReason.CALM, 0
    best = min(allowed, key=lambda count: (loads[count], abs(count - present)))
    if best == present or loads[best] > (1 - limits.margin) * loads[present]:
        return PlacementReason.BALANCED, 0
    return (PlacementReason.MORE_PREFILL if best > present else PlacementReason.MORE_DECODE), best - present


def _pins(fit: Sequence[PlacedInstance]) -> tuple[tuple[str, Role], ...]:
    return tuple((each.instance_id, each.pinned) for each in fit if each.pinned is not None and each.pinned is not each.role)


def _allowed(fit: Sequence[PlacedInstance], limits: PlacementLimits) -> list[int]:
    """Numbers of prefill instances that pins and bounds allow. Bounds that so few instances cannot keep count as none; that
    somebody decodes never does."""
    count = len(fit)
    least = sum(instance.pinned is Role.PREFILL for instance in fit)
    most = count - sum(instance.pinned in (Role.MUX, Role.DECODE) for instance in fit)
    pinned = [prefill for prefill in range(least, most + 1) if prefill < count] or [least]
    return [prefill for prefill in pinned if limits.prefill.hold(prefill) and limits.decode.hold(count - prefill)] or pinned


def _moved(fit: Sequence[PlacedInstance], more: int, limits: PlacementLimits) -> tuple[tuple[str, Role], ...]:
    """`more` prefill instances (below 0: fewer), of those with the fewest requests."""
    role = Role.PREFILL if more > 0 else limits.decode_role
    movable = [each for each in fit if each.pinned is None and (each.role is Role.PREFILL) is (more < 0)]
    chosen = sorted(movable, key=lambda each: (each.busy, each.instance_id))[: abs(more)]
    return tuple((each.instance_id, role) for each in chosen)


def _load(demand: Demand, prefill: int, count: int) -> float:
    """Of the busier side of `count` instances, of which `prefill` only prefill; 1: it is busy all the time."""
    if prefill == count:
        return math.inf
    if not prefill:
        return MIXED * (demand.prefill + demand.decode) / count
    return max(demand.prefill / prefill, demand.decode / (count - prefill))


def fresh(demand: Demand | None, now: float, limits: PlacementLimits) -> bool:
    """Whether it is known, and of figures that are new enough to go by."""
    return demand is not None and now - demand.taken_s <= limits.stale_s


def _plan(
    reason: PlacementReason,
    view: PlacementView,
    limits: PlacementLimits,
    changes: tuple[tuple[str, Role], ...] = (),
    later: tuple[tuple[str, Role], ...] = (),
) -> PlacementPlan:
    """`later`: changes that are wanted, and wait."""
    roles = {each.instance_id: each.requested or each.role for each in view.instances} | dict(changes) | dict(later)
    return PlacementPlan(reason, tuple(roles.items()), changes, _replicas(view, limits))


def _replicas(view: PlacementView, limits: PlacementLimits) -> int | None:
    """As many instances as keep the busier side at `busy`; fewer than there are only when it would stay under that by the
    margin. None without fresh figures."""
    if limits.replicas is None or view.demand is None or not fresh(view.demand, view.now, limits):
        return None
    present, most = len(view.instances), limits.replicas.most
    wanted = _enough(view.demand, limits, limits.busy)
    if wanted <= present:
        wanted = min(_enough(view.demand, limits, (1 - limits.margin) * limits.busy), present)
    return int(min(max(wanted, limits.replicas.least), most))


def _enough(demand: Demand, limits: PlacementLimits, load: float) -> int:
    """The fewest instances that have no more than this load in their best ratio, up to as many as are allowed."""
    assert limits.replicas is not None
    most = int(limits.replicas.most)
    for count in range(max(limits.replicas.least, 1), most):
        allowed = [p for p in range(count) if limits.prefill.hold(p) and limits.decode.hold(count - p)]
        if allowed and min(_load(demand, prefill, count) for prefill in allowed) <= load:
            return count
    return most
