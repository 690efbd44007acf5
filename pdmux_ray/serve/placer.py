"""Looks at a fleet, has `policy.placement` decide, and keeps apart what is planned, what was asked for and what is.

Knows nothing of ray, lines or clocks: the simulator's controller uses the same rules.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmux_ray.config import AppConfig, TopologyConfig
from pdmux_ray.config_placement import BoundsConfig, PlacementConfig
from pdmux_ray.latency.loading import as_told
from pdmux_ray.policy.decisions import PlacementPlan, PlacementReason
from pdmux_ray.policy.demand import Capacity, Demand, FleetFigures, demand_of
from pdmux_ray.policy.placement import Bounds, PlacedInstance, PlacementLimits, PlacementMemory, PlacementView, fresh, place
from pdmux_ray.policy.views import CostModel
from pdmux_ray.serve.wire import Figures
from pdmux_ray.types import Load, Role

if TYPE_CHECKING:
    from pdmux_ray.metrics import exporter

# An instance that was given a role and has not taken it for so long is thought to have refused it.
PATIENCE_S = 5.0
THERE_S = 30.0  # after its begin: who is not there by then is missing

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Seen:
    """One instance, by the newest that it has said."""

    instance_id: str
    rank: int
    role: Role | None  # None: it has not said
    load: Load | None  # None: its line is not up yet
    load_s: float  # when that came
    layers: int  # of its model
    units: int  # of its device
    fit: bool  # it can be given requests
    figures: Figures = field(default_factory=dict)  # its counters


class Placer:
    """Owner: the controller's event loop, or the simulation."""

    def __init__(self, config: AppConfig, model: CostModel, now: float) -> None:
        """`now`: when it begins. Nothing but pins and bounds moves within the first cool-down: roles may just have changed."""
        assert config.topology is not None
        self._config = config
        self._model = model
        self._settings = config.placement
        self.limits = limits_of(config.placement, config.topology)
        self._memory = PlacementMemory(changed_s=now)
        self._requested: dict[str, tuple[Role, float]] = {}  # instance id -> (role, when); not taken yet
        self._decisions = Counter[PlacementReason]()
        self._plan: PlacementPlan | None = None
        self._told: tuple[tuple[str, Role], ...] = ()  # the changes that the log has last
        self._demand: Demand | None = None
        self._observed: dict[str, Role] = {}
        self._replicas: int | None = None
        self._began_s = self._newest_s = now  # the newest figures' time is at first its own
        self._idle_pins: frozenset[str] = frozenset()

    def look(self, now: float, seen: Sequence[Seen], figures: FleetFigures | None) -> PlacementPlan:
        """What is to be done now. `figures`: the newest that the source has; None: it has none."""
        known = [each for each in seen if each.role is not None]
        self._observed = {each.instance_id: each.role for each in known if each.role is not None}
        self._requested = {
            name: (role, since)
            for name, (role, since) in self._requested.items()
            if self._observed.get(name, role) is not role and now - since < PATIENCE_S
        }
        capacity = self._capacity(known)
        self._demand = demand_of(figures, capacity) if figures is not None and capacity is not None else None
        if figures is not None:
            self._newest_s = max(figures.taken_s, self._newest_s)
        view = PlacementView(now, [self._placed(each) for each in known], self._demand)
        before = self._plan.reason if self._plan else None
        self._plan, self._memory = place(view, self._memory, self.limits)
        self._decisions[self._plan.reason] += 1
        if not self._settings.dry_run:
            self._replicas = self._plan.replicas if self._plan.replicas is not None else self._replicas
            self._requested |= {name: (role, now) for name, role in self._plan.changes}
        self._tell(before)
        if now - self._began_s >= THERE_S:
            self._tell_idle_pins(seen)
        return self._plan

    def refused(self, instance_id: str) -> None:
        """It has not taken the role that it was given."""
        self._requested.pop(instance_id, None)

    def figures(self, now: float) -> exporter.Figures:
        """Its own metrics."""
        plan, demand = self._plan, self._demand
        states = {
            "planned": Counter(role for _, role in plan.roles) if plan else Counter[Role](),
            # With a role that it was given and has not taken yet that one, else the one that it has.
            "requested": Counter(self._requested.get(name, (role, now))[0] for name, role in self._observed.items()),
            "observed": Counter(self._observed.values()),
        }
        found: dict[str, exporter.Value] = {
            "pdmux_placement_decisions_total": {reason.value: float(self._decisions[reason]) for reason in PlacementReason},
            "pdmux_placement_instances": {
                (role.value, state): float(counts[role]) for state, counts in states.items() for role in Role
            },
            "pdmux_placement_age_seconds": now - self._newest_s,
            "pdmux_placement_stale": float(not fresh(demand, now, self.limits)),
            "pdmux_placement_idle_pins": float(len(self._idle_pins)),
        }
        if demand is not None:
            found["pdmux_placement_demand"] = {"prefill": demand.prefill, "decode": demand.decode}
        if plan is not None and plan.replicas is not None:
            found["pdmux_placement_replicas"] = float(plan.replicas)
        return found

    @property
    def replicas(self) -> int | None:
        """How many instances Serve is to have, by the last look that could tell; None: that is not for it to say, or this is a
        dry run."""
        return self._replicas

    def _placed(self, seen: Seen) -> PlacedInstance:
        assert seen.role is not None
        asked = self._requested.get(seen.instance_id)
        busy = seen.load.running + seen.load.waiting if seen.load else 0
        pinned = self._pinned(seen)
        return PlacedInstance(seen.instance_id, seen.role, busy, seen.fit, pinned, asked[0] if asked else None)

    def _pinned(self, seen: Seen) -> Role | None:
        for key, role in self._settings.pinned.items():
            if key == str(seen.rank) or (not key.isdecimal() and seen.instance_id.startswith(key)):
                return role
        return None

    def _capacity(self, seen: Sequence[Seen]) -> Capacity | None:
        """Of the smallest instance, with the corrections that the first one has told; None while none has said how large it
        is."""
        loaded = [(each, each.load) for each in seen if each.load is not None]
        if not loaded:
            return None
        engine, first = self._config.engine, loaded[0][0]
        itl_s = engine.multiplex.itl_s
        return Capacity(
            as_told(self._model, first.figures),
            first.layers,
            first.units,
            engine.max_batch,
            min(load.total_pages for _, load in loaded) * engine.page_size,
            math.inf if itl_s is None else itl_s,
        )

    def _tell(self, before: PlacementReason | None) -> None:
        plan, demand = self._plan, self._demand
        assert plan is not None
        if plan.changes and not (self._settings.dry_run and plan.changes == self._told):
            self._told = plan.changes
            wants = f"prefill wants {demand.prefill:.2f} instances, decode {demand.decode:.2f}" if demand else "no figures"
            given = ", ".join(f"{name} {role.value}" for name, role in plan.changes)
            would = "would give" if self._settings.dry_run else "gives"
            log.info("Placement: %s, so it %s new roles: %s (%s)", plan.reason.value, would, given, wants)
        elif plan.reason is PlacementReason.STALE and before is not PlacementReason.STALE:
            log.warning("Placement: its figures are missing or older than %.0f s: no role changes", self.limits.stale_s)

    def _tell_idle_pins(self, seen: Sequence[Seen]) -> None:
        """Pins by an id, which is new at every start. What is wrong with ranks, `PlacementConfig.check` says at the start."""
        ids = [each.instance_id for each in seen]
        by_id = [key for key in self._settings.pinned if not key.isdecimal()]
        before, self._idle_pins = self._idle_pins, frozenset(key for key in by_id if not any(i.startswith(key) for i in ids))
        for key in sorted(self._idle_pins - before):
            log.warning(
                "Placement: no instance's id begins with %r, so this pin holds nobody: `pdmux role` lists the ids, and a rank "
                "(the first instance's is 0) outlives a start",
                key,
            )


def limits_of(config: PlacementConfig, topology: TopologyConfig) -> PlacementLimits:
    """Who does not prefill gets role decode where the topology has such instances, and none that do both."""
    replicas = config.replicas
    return PlacementLimits(
        prefill=_bounds(config.prefill, min(topology.prefill, 1)),
        decode=_bounds(config.decode, 1),
        decode_role=Role.MUX if topology.mux or not topology.decode else Role.DECODE,
        replicas=None if replicas is None else Bounds(replicas.min, replicas.max),
        busy=config.busy,
        margin=config.margin,
        confirm_s=config.confirm_s,
        cool_down_s=config.cool_down_s,
        stale_s=config.stale_s,
    )


def _bounds(config: BoundsConfig, least: int) -> Bounds:
    return Bounds(least if config.min is None else config.min, math.inf if config.max is None else config.max)
