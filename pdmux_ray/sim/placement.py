"""The placement controller of a simulated fleet: the served one's code, on the fleet's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pdmux_ray.config import AppConfig
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.policy.decisions import PlacementPlan
from pdmux_ray.policy.demand import FleetFigures
from pdmux_ray.serve.known import peers_of
from pdmux_ray.serve.placer import Placer, Seen
from pdmux_ray.serve.sources import Window
from pdmux_ray.sim.events import World
from pdmux_ray.sim.gateway import SimGateway
from pdmux_ray.sim.instance import SimInstance
from pdmux_ray.sim.transfers import Transfers
from pdmux_ray.types import Role


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the fleet, and what came of it."""

    time_s: float
    seen: Sequence[Seen]
    figures: FleetFigures | None
    plan: PlacementPlan


@dataclass(frozen=True, slots=True)
class Fleet:
    """What it acts upon."""

    world: World
    instances: Sequence[SimInstance]
    gateway: SimGateway
    transfers: Transfers


class SimPlacement:
    """Looks every `placement.period_s`. A role takes `line_s` to its instance, and as long to the gateway.

    `placement.replicas` changes nothing: as many instances as at the start. The figures are the instances' own, also with
    `placement.prometheus`.
    """

    def __init__(self, config: AppConfig, device: DeviceModel, fleet: Fleet, line_s: float) -> None:
        self.looks: list[Look] = []
        self._fleet = fleet
        self._device = device
        self._line_s = line_s
        self._period_s = config.placement.period_s
        self._dry_run = config.placement.dry_run
        self._placer = Placer(config, device.costs, fleet.world.now())
        self._window = Window()
        self._look()

    def _look(self) -> None:
        world = self._fleet.world
        now, seen = world.now(), [self._seen(rank, instance) for rank, instance in enumerate(self._fleet.instances)]
        figures = self._window.take(now, seen)
        plan = self._placer.look(now, seen, figures)
        self.looks.append(Look(now, seen, figures, plan))
        if not self._dry_run:
            for name, role in plan.changes:
                world.after(self._line_s, partial(self._take_role, name, role))
        world.after(self._period_s, self._look)

    def _seen(self, rank: int, instance: SimInstance) -> Seen:
        instance.settle()
        return Seen(
            instance.name,
            rank,
            instance.role,
            instance.engine.load(),
            self._fleet.world.now(),
            self._device.layout.layers,
            self._device.units,
            True,
            {**instance.engine.counters.figures(), **instance.figures},
        )

    def _take_role(self, name: str, role: Role) -> None:
        for instance in self._fleet.instances:
            if instance.name == name:
                instance.role = role
        roles = {instance.name: instance.role for instance in self._fleet.instances}
        for one, peers in peers_of(roles).items():
            self._fleet.transfers.link(one, sorted(peers))
        self._fleet.world.after(self._line_s, partial(self._fleet.gateway.take_roles, roles))
