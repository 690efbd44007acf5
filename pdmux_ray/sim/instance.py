"""One instance of a simulated fleet: an engine on a device of a cost model, with its end of transfers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from pdmux_ray.config import EngineConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.handoffs import transfer_limits
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import IntegrityError, PdmuxError
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.serve.known import HEARTBEAT_S, LOAD_PERIOD_S
from pdmux_ray.sim.device import CostDevice, DeviceModel
from pdmux_ray.sim.events import StepClock, World
from pdmux_ray.sim.transfers import Port, Transfers
from pdmux_ray.types import Load, ModelFacts, NewRequest, Role, TokenEvent

FIGURES_PERIOD_S = 1.0  # between two tellings of what its steps have taught it

Listener = Callable[[str, Load, Sequence[TokenEvent]], None]
"""(instance, its load figures, events)."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the instances of a fleet share."""

    world: World
    transfers: Transfers
    config: EngineConfig
    device: DeviceModel
    facts: ModelFacts
    spread: float  # see `CostDevice`
    learning: bool = False  # from its steps, as served instances do, when the costs are of a profile's kind


class SimInstance:
    """`tell` is called with its news, at the time when they leave it."""

    def __init__(self, name: str, role: Role, around: Surroundings, seed: str, tell: Listener) -> None:
        self.name = name
        self.role = role
        self._world = around.world
        self._fetch_s = around.config.transfer.fetch_s
        self._tell = tell
        self._told: Load | None = None  # by `_tell_load`
        self._told_s = 0.0  # when
        self._next_s = math.inf  # when the next step is planned
        self._busy_until_s = 0.0
        self._clock = StepClock(around.world)
        device = CostDevice(around.device, self._clock, Random(seed), around.spread)
        costs = around.device.costs
        self._learned = CorrectedCosts(costs) if around.learning and isinstance(costs, FittedCosts) else None
        self.figures: Mapping[str, float | dict[str, float]] = {}  # what a gateway knows of that
        endpoint = around.transfers.add(name, around.device.layout, transfer_limits(around.config.transfer))
        self.engine = Engine(
            device,
            resolve_limits(around.config, around.facts, device),
            self._publish,
            self._clock,
            costs=self._learned or costs,
            port=Port(endpoint, around.transfers, self._clock),
        )
        endpoint.wake_with(self._wake)
        self._tell_load()
        if self._learned is not None:
            self._tell_figures(self._learned)

    def submit(self, new: NewRequest) -> PdmuxError | None:
        """What it refuses the request with. Now is when it comes here."""
        if new.prefill_peers:
            new = replace(new, fetch_deadline_s=self._world.now() + self._fetch_s)
        try:
            self.engine.submit(new)
        except PdmuxError as error:
            return error
        self._wake()
        return None

    @property
    def idle(self) -> bool:
        return self.engine.rest_s is None and self._next_s == math.inf

    def check(self) -> None:
        """When it is idle: every page is free or cached. Raises IntegrityError."""
        self.engine.check_integrity()
        load = self.engine.load()
        if load.free_pages != load.total_pages:
            raise IntegrityError(f"{self.name}: {load.total_pages - load.free_pages} pages are missing")

    def _wake(self) -> None:
        """There is something for the engine: a step takes it in, after the one that is under way."""
        self._plan_step(max(self._world.now(), self._busy_until_s))

    def _plan_step(self, time_s: float) -> None:
        if time_s < self._next_s:
            self._next_s = time_s
            self._world.at(time_s, partial(self._step, time_s))

    def _step(self, planned_s: float) -> None:
        if planned_s != self._next_s:
            return  # another one was planned before it
        self._next_s = math.inf
        ran = self.engine.step()
        self._busy_until_s = self._clock.step_ends()
        rest_s = self.engine.rest_s
        if ran:
            self._plan_step(self._busy_until_s)
        elif rest_s is not None:
            self._plan_step(self._busy_until_s + rest_s)

    def _publish(self, sink: str, events: list[TokenEvent]) -> None:
        """Amid a step: the news leave when the step has come so far."""
        self._world.at(self._clock.now(), lambda: self._tell(self.name, self.engine.load(), events))

    def _tell_load(self) -> None:
        """Figures that have changed, also when there are no other news; and that it is there."""
        load, now = self.engine.load(), self._world.now()
        if load != self._told or now - self._told_s >= HEARTBEAT_S:
            self._told, self._told_s = load, now
            self._tell(self.name, load, ())
        self._world.after(LOAD_PERIOD_S, self._tell_load)

    def _tell_figures(self, learned: CorrectedCosts) -> None:
        self.figures = learned.figures().exported()
        self._world.after(FIGURES_PERIOD_S, partial(self._tell_figures, learned))
