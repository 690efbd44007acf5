"""KV between simulated instances: the real endpoints over the transport within a process, stepped when something is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.api import Fetch, HandoffId, KvPort, Limits, PortEvent
from kv_transfer.endpoint import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.local import LocalNetwork, LocalTransport
from kv_transfer.weather import Weather
from pdmux_ray.clock import Clock
from pdmux_ray.sim.events import World

LATENCY_S = 10e-6  # of a message and of a write besides its bytes: aiconfigurator's figure for H200 nodes


@dataclass(slots=True)
class _End:
    """An endpoint, and when it has something to do unless something comes. Only then is it stepped: others are many."""

    endpoint: Endpoint
    transport: LocalTransport
    due_s: float = -math.inf

    def step(self, now: float) -> bool:
        """Whether there was anything to do."""
        if self.due_s > now and not self.transport.has_events:
            return False
        self.due_s = self.endpoint.step()
        return True


class Transfers:
    """All endpoints of a fleet. No bytes are moved: the time passes that they would take. `bytes_per_s`: of each one's link, in
    each direction."""

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self.world = world
        self._network = LocalNetwork(world.now, Weather(latency_s=LATENCY_S, bytes_per_s=bytes_per_s))
        self._ends: dict[str, _End] = {}
        self._due_s = math.inf  # when `look` is planned next

    def add(self, name: str, layout: KVLayout, limits: Limits) -> Endpoint:
        transport = self._network.add(name, layout, None)
        self._ends[name] = _End(Endpoint(transport, limits, clock=self.world.now), transport)
        return self._ends[name].endpoint

    def link(self, name: str, peers: Sequence[str]) -> None:
        for peer in peers:
            self._ends[name].endpoint.connect(peer, peer)
        if peers:
            self.told(name)

    def figures(self) -> list[dict[str, float]]:
        """Of each end, what a gateway reckons the bandwidth by."""
        stats = [end.endpoint.stats for end in self._ends.values()]
        return [
            {"pdmux_kv_written_bytes_total": each.written_bytes, "pdmux_kv_written_seconds_total": each.written_s}
            for each in stats
        ]

    def told(self, name: str) -> None:
        """That endpoint has been told something: does that and what is due, and plans to look again when something else is."""
        self._ends[name].due_s = -math.inf
        self._look()

    def _look(self) -> None:
        now = self.world.now()
        while self._step(now):
            pass
        due_s = min(self._network.next_due, *[end.due_s for end in self._ends.values()])
        if due_s < self._due_s:
            self._due_s = due_s
            self.world.at(due_s, partial(self._planned, due_s))

    def _planned(self, due_s: float) -> None:
        if due_s == self._due_s:  # else an earlier look has planned another one
            self._due_s = math.inf
            self._look()

    def _step(self, now: float) -> bool:
        """Whether anything was done."""
        with self._network.lock:
            self._network.deliver()
        return any([end.step(now) for end in self._ends.values()]) or self._network.next_due <= now


class Port(KvPort):
    """An engine's port. What the engine says amid a step, it says at the time that its step has come to: not before."""

    def __init__(self, name: str, endpoint: Endpoint, transfers: Transfers, clock: Clock) -> None:
        """`name`: of the instance."""
        self._name = name
        self._endpoint = endpoint
        self._transfers = transfers
        self._clock = clock

    @property
    def epoch(self) -> int:
        return self._endpoint.epoch

    def fetch(self, fetch: Fetch) -> None:
        self._say(partial(self._endpoint.fetch, fetch))

    def drop(self, handoff: HandoffId) -> None:
        self._say(partial(self._endpoint.drop, handoff))

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        self._say(partial(self._endpoint.computed, handoff, layers, tokens, tuple(pages)))

    def failed(self, handoff: HandoffId) -> None:
        self._say(partial(self._endpoint.failed, handoff))

    def busy(self, seconds: float) -> None:
        self._endpoint.busy(seconds)  # said when a step begins

    def poll(self) -> Sequence[PortEvent]:
        return self._endpoint.poll()

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._endpoint.wake_with(wake)

    def _say(self, act: Callable[[], None]) -> None:
        def say() -> None:
            act()
            self._transfers.told(self._name)

        self._transfers.world.at(self._clock.now(), say)
