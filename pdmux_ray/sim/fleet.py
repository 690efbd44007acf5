"""A fleet on a virtual clock: what becomes of requests that come to instances of a configuration, on a device of a cost model.

    run = simulate(config, device_model(H200, LLAMA_8B), plan(asks, due_s), seed=1)
    summarize_run("2p2d", rate, run.lifelines, slo)

The engine (scheduler, pages, policies), the router and the transfers are those that servers run. Simulated are arrivals, the
clock, the device, the wire and the gateway's lines. Equal arguments give equal lifelines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from pdmux_ray.config import AppConfig
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.timeline import KEPT
from pdmux_ray.errors import IntegrityError
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.serve.known import peers_of
from pdmux_ray.serve.router import Device, Router, RouterSettings, one_pass_tokens
from pdmux_ray.sim.events import Turn, World
from pdmux_ray.sim.gateway import SimGateway
from pdmux_ray.sim.instance import SimInstance, Surroundings
from pdmux_ray.sim.placement import Fleet, Look, SimPlacement
from pdmux_ray.sim.transfers import Transfers
from pdmux_ray.types import ModelFacts, Role
from pdmux_ray.workload.requests import Planned, PlannedRequest

LINE_S = 0.5e-3  # of a message between gateway and instance
SPREAD = 0.03  # of step times about their prediction
BEGIN_S = 1.0  # until then the instances link; what comes to them is counted from here
DRAIN_S = 60.0  # after the last request's end, for transfers that nobody waits for
WATCHED_EVERY_S = 1.0  # of simulated time
RECORDS = 8 * KEPT  # of all timelines together, some 80 MB: of a large fleet each has fewer

Watch = Callable[[int], None]
"""Called now and then with how many requests have ended."""

RouterOf = Callable[..., Router]
"""Makes a router: takes what `Router` takes."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. Aligned, in order of arrival; times from the start of the simulation, `BEGIN_S` before the first arrival
    that could be."""

    lifelines: Sequence[Lifeline]
    choices: Sequence[RouteChoice]
    looks: Sequence[Look]  # of the placement controller, where there is one
    engines: dict[str, Engine]  # by instance, for their counters and timelines
    roles: dict[str, Role]  # by instance, at the end
    events: int  # that happened


def simulate(
    config: AppConfig,
    device: DeviceModel,
    planned: Planned,
    *,
    seed: int = 0,
    spread: float = SPREAD,
    line_s: float = LINE_S,
    context_length: int = 131_072,
    learning: bool = False,
    drain_s: float = math.inf,
    watch: Watch | None = None,
    router: RouterOf = Router,
    coalesce: bool = True,
) -> Run:
    """Until every request has ended and every page is back, or for `drain_s` after the last arrival: who is not done then is
    UNFINISHED. Raises IntegrityError when a page is not back, ConfigError for settings that no engine takes. The pool is the
    device's, whatever the configuration says; prompts are token ids. `planned` is gone through once, as time passes.
    `learning`, `coalesce`: see `Surroundings`. `router`: another one than servers have, to compare with."""
    world = World()
    transfers = Transfers(world, device.link_bytes_per_s)
    settings = RouterSettings.of(config)
    chooser = router(settings, model=device.costs, clock=world.now, rng=Random(f"router {seed}"))
    gateway = SimGateway(world, chooser, line_s, config.gateway.request_timeout_s)
    facts = ModelFacts(context_length, vocab_size=2**24, eos_token_ids=frozenset())
    roles = config.roles
    records = min(KEPT, RECORDS // len(roles))
    around = Surroundings(world, transfers, config.engine, device, facts, spread, learning, coalesce, records)
    instances = [
        SimInstance(f"{role.value}-{rank}", role, around, f"{rank} {seed}", gateway) for rank, role in enumerate(roles)
    ]
    _link(instances, transfers)
    shown = Device(device.layout.layers, device.units, one_pass_tokens(config.engine), device.kv_bytes_per_token)
    gateway.meet(instances, shown, transfers)
    fleet = Fleet(world, instances, gateway, transfers)
    placement = SimPlacement(config, device, fleet, line_s) if config.placement.enabled else None
    world.run(lambda: False, BEGIN_S)
    _arrivals(world, gateway, iter(planned))
    if watch is not None:
        _look(world, gateway, watch)
    looks = placement.looks if placement else []
    limit_s = BEGIN_S + planned[-1].due_s + drain_s if planned else math.inf
    if not world.run(lambda: gateway.ended == len(planned), limit_s):
        gateway.close(limit_s)
        return _run(gateway, instances, looks, world.happened)
    if not world.run(lambda: all(instance.idle for instance in instances), world.now() + DRAIN_S):
        raise IntegrityError("a transfer of a request that has ended does not end")
    for instance in instances:
        instance.check()
    return _run(gateway, instances, looks, world.happened)


def _look(world: World, gateway: SimGateway, watch: Watch) -> None:
    watch(gateway.ended)
    world.after(WATCHED_EVERY_S, partial(_look, world, gateway, watch))


def _link(instances: Sequence[SimInstance], transfers: Transfers) -> None:
    for name, peers in peers_of({instance.name: instance.role for instance in instances}).items():
        transfers.link(name, sorted(peers))


def _arrivals(world: World, gateway: SimGateway, coming: Iterator[PlannedRequest]) -> None:
    """The next one, and after it those that follow: so few are in memory at a time."""
    request = next(coming, None)
    if request is None:
        return

    def arrive() -> None:
        gateway.arrive(request)
        _arrivals(world, gateway, coming)

    world.at(BEGIN_S + request.due_s, arrive, Turn.ARRIVAL)


def _run(gateway: SimGateway, instances: Sequence[SimInstance], looks: Sequence[Look], events: int) -> Run:
    return Run(
        [sent.lifeline for sent in gateway.sent.values()],
        [sent.choice for sent in gateway.sent.values()],
        looks,
        {instance.name: instance.engine for instance in instances},
        {instance.name: instance.role for instance in instances},
        events,
    )
