"""One instance of a simulated fleet: an engine on a device of a cost model, with its end of transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from pdmux_ray.config import EngineConfig
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.handoffs import transfer_limits
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.engine.timeline import KEPT
from pdmux_ray.errors import IntegrityError, PdmuxError
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.policy.look_ahead import NONE_ALIKE
from pdmux_ray.serve.known import HEARTBEAT_S, LOAD_PERIOD_S
from pdmux_ray.sim.device import TOKEN, CostDevice
from pdmux_ray.sim.events import StepClock, Turn, World
from pdmux_ray.sim.streak import Lengths, Streak
from pdmux_ray.sim.transfers import Port, Transfers
from pdmux_ray.types import Load, ModelFacts, NewRequest, Role, TokenEvent

FIGURES_PERIOD_S = 1.0  # between two tellings of what its steps have taught it
LEAST_STEPS, MOST_STEPS = 2, 64  # that are taken at once; more would be thought out for nothing when something comes


class Listener(Protocol):
    """Hears an instance's news when they leave it."""

    def hear(self, name: str, load: Load, events: Sequence[TokenEvent]) -> None:
        """`load`: its figures."""

    def hear_streak(self, name: str, streak: Streak) -> None:
        """When it has ended. `untold` has it until this is known."""


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
    coalesce: bool = True  # decode steps that are alike are one event; else each is one
    records: int = KEPT  # of a timeline


class SimInstance:
    """`listener` hears its news."""

    def __init__(self, name: str, role: Role, around: Surroundings, seed: str, listener: Listener) -> None:
        self.name = name
        self.role = role
        self._world = around.world
        self._fetch_s = around.config.transfer.fetch_s
        self._listener = listener
        self.untold: list[Streak] = []  # of which the listener doesn't know all yet, the oldest first
        self._streak: Streak | None = None  # under way
        self._coalesce = around.coalesce
        self._told: Load | None = None  # by `_tell_load`
        self._told_s = 0.0  # when
        self._next_s = math.inf  # when the next step is planned
        self._busy_until_s = 0.0
        self._clock = StepClock(around.world)
        self._device = device = CostDevice(around.device, self._clock, Random(seed), around.spread)
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
            port=Port(name, endpoint, around.transfers, self._clock),
            records=around.records,
        )
        endpoint.wake_with(self._wake)
        self._tell_load()
        if self._learned is not None:
            self._tell_figures(self._learned)

    def submit(self, new: NewRequest) -> PdmuxError | None:
        """What it refuses the request with. Now is when it comes here."""
        self.settle()
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

    def settle(self, now: float | None = None) -> None:
        """The engine is as if it had taken one by one what has begun before `now` (None: now) of steps that are alike."""
        streak = self._streak
        if streak is None:
            return
        begun = streak.begun_before(self._world.now() if now is None else now)
        if begun > streak.taken:
            self.engine.repeat(streak.begin_of(streak.taken), streak.ends_s[streak.taken : begun], TOKEN)
            self._device.passed(begun - streak.taken)
            streak.taken = begun

    def _wake(self) -> None:
        """There is something for the engine: a step takes it in, after the one that is under way."""
        streak = self._streak
        if streak is not None:
            self.settle()
            del streak.ends_s[streak.taken :]
            self._busy_until_s = streak.end_s
        self._plan_step(max(self._world.now(), self._busy_until_s))

    def _plan_step(self, time_s: float) -> None:
        if time_s < self._next_s:
            self._next_s = time_s
            self._world.at(time_s, partial(self._step, time_s), Turn.STEP)

    def _begin_streak(self) -> bool:
        """Whether the steps from now on are alike: nothing more happens before the last one has ended."""
        now, alike = self._world.now(), self.engine.steps_alike() if self._coalesce else NONE_ALIKE
        if alike.steps < LEAST_STEPS:
            return False
        decoding = self.engine.decoding
        lengths = [Lengths(request.known_tokens, request.held_pages) for request in decoding]
        alike = alike._replace(steps=min(alike.steps, MOST_STEPS))
        context_tokens = sum([tokens for tokens, _ in lengths])
        ends_s = self._device.ends_ahead(now, len(lengths), context_tokens, alike)
        if not ends_s:
            return False
        names = [request.request_id for request in decoding]
        self._streak = Streak(names, lengths, self._device.page_size, now, ends_s, self.engine.load())
        self.untold.append(self._streak)
        self._busy_until_s = ends_s[-1]
        self.engine.expect(self._busy_until_s - now)
        self._plan_step(self._busy_until_s)
        return True

    def _end_streak(self) -> None:
        streak = self._streak
        if streak is None:
            return
        self.settle(math.inf)
        self._streak, streak.after = None, self.engine.load()
        if streak.looks_s:
            self._told, self._told_s = streak.look(-1)
        if streak.ends_s:
            self._listener.hear_streak(self.name, streak)
        else:
            self.untold.remove(streak)

    def _step(self, planned_s: float) -> None:
        if planned_s != self._next_s:
            return  # another one was planned before it
        self._next_s = math.inf
        self._end_streak()
        if self._begin_streak():
            return
        ran = self.engine.step()
        self._busy_until_s = self._clock.step_ends()
        rest_s = self.engine.rest_s
        if ran:
            self._plan_step(self._busy_until_s)
        elif rest_s is not None:
            self._plan_step(self._busy_until_s + rest_s)

    def _publish(self, sink: str, events: list[TokenEvent]) -> None:
        """Amid a step: the news leave when the step has come so far."""
        self._world.at(self._clock.now(), lambda: self._listener.hear(self.name, self.engine.load(), events))

    def _tell_load(self) -> None:
        """Figures that have changed, also when there are no other news; and that it is there."""
        now, streak = self._world.now(), self._streak
        self._world.after(LOAD_PERIOD_S, self._tell_load)
        if streak is not None and streak.begun_before(now) > streak.taken:
            streak.looks_s.append(now)  # the load has changed: at least, how long the step has taken
            return
        load = self.engine.load()
        if load != self._told or now - self._told_s >= HEARTBEAT_S:
            self._told, self._told_s = load, now
            self._listener.hear(self.name, load, ())

    def _tell_figures(self, learned: CorrectedCosts) -> None:
        self.settle()
        self.figures = learned.figures().exported()
        self._world.after(FIGURES_PERIOD_S, partial(self._tell_figures, learned))
