"""An engine that is asked for exports, and the port that the test speaks through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_transfer.api import HandoffId, LossReason, Sent, Unwanted, Wanted
from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.engine.counters import ExportEnd
from pdmux_ray.engine.handoffs import NoPort
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.types import NewRequest

from .world import Worlds, expected

WANTED = HandoffId(77, 0)


class Peer(NoPort):
    """A port that the test speaks through, and that notes what the engine says."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.reports: list[tuple[range, range]] = []
        self.pages: list[int] = []
        self.order: list[HandoffId] = []  # of the reports
        self.said_failed: list[HandoffId] = []

    def want(self, tokens: Sequence[int], deadline: float = 60.0, handoff: HandoffId = WANTED) -> None:
        self.events.append(Wanted(handoff, "d", tuple(tokens), 0, deadline))

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        self.reports.append((layers, tokens))
        self.pages.extend(pages)
        self.order.append(handoff)

    def failed(self, handoff: HandoffId) -> None:
        self.said_failed.append(handoff)

    def poll(self) -> Sequence[Any]:
        events, self.events = self.events, []
        return events

    def unwant(self) -> None:
        self.events.append(Unwanted(WANTED, LossReason.DROPPED))

    def sent(self, complete: bool = True) -> None:
        self.events.append(Sent(WANTED, complete))


class Instance:
    """An engine that may be asked for exports."""

    def __init__(self, worlds: Worlds, bounds: EngineLimits | None = None, **more: Any) -> None:
        self.peer = Peer()
        self.clock: Clock = more.pop("clock", VirtualClock())
        self.engine, self.log = worlds(bounds, clock=self.clock, port=self.peer, **more)

    def serve(self, new: NewRequest) -> None:
        self.engine.submit(new)
        while not self.log.tokens(new.request_id):
            self.engine.step()

    @property
    def lent(self) -> int:
        return self.engine.load().leased_pages

    @property
    def ends(self) -> dict[ExportEnd, int]:
        return {end: count for end, count in self.engine.counters.exports.items() if count}

    def assert_right(self, *news: NewRequest) -> None:
        for new in news:
            assert (self.log.tokens(new.request_id), self.log.finish(new.request_id)) == expected(new, self.engine.limits)
