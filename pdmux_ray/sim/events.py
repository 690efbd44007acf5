"""What happens when: the events of a simulation in order of time, and the clocks that its parts read."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from enum import IntEnum


class Turn(IntEnum):
    """Who comes first, of events at the same time: so what happens does not hang on when they were planned."""

    ARRIVAL = 0  # of a request at the gateway
    NEWS = 1
    STEP = 2  # of an engine: it sees what has come by then


class World:
    """Events by time; at the same time by their turn, and then in the order in which they were planned, so that equal runs are
    equal."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._planned: list[tuple[float, Turn, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.happened = 0  # events

    def now(self) -> float:
        return self._now_s

    def at(self, time_s: float, act: Callable[[], None], turn: Turn = Turn.NEWS) -> None:
        """Plans an event. Raises ValueError for a time that has passed."""
        if time_s < self._now_s:
            raise ValueError(f"it is {self._now_s} s: nothing can be planned for {time_s} s")
        heapq.heappush(self._planned, (time_s, turn, next(self._order), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self._now_s + seconds, act)

    def run(self, done: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Lets events happen until `done`, which is asked after each one. False when nothing is planned before `limit_s` any
        more."""
        planned, pop = self._planned, heapq.heappop
        while not done():
            if not planned or planned[0][0] > limit_s:
                return False
            self._now_s, _, _, act = pop(planned)
            self.happened += 1
            act()
        return True


class StepClock:
    """The clock of one instance. A step of its engine is one event, at the time when it begins: `sleep` lets time pass for this
    instance alone, and `step_ends` says when its step will have ended for everyone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead_s: float | None = None  # where the step under way has come to; None between two steps

    def now(self) -> float:
        return self._world.now() if self._ahead_s is None else self._ahead_s

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self._ahead_s = self.now() + seconds

    def step_ends(self) -> float:
        """From now on it reads what everyone reads."""
        ends_s, self._ahead_s = self.now(), None
        return ends_s
