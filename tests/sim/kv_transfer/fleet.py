"""Instances of which only the engine is made up: endpoints over a local network, pools of real bytes, virtual time.

Every byte that should be is known: KV is a function of the prompt, and a page that is given up is poisoned at once. So a
transfer that reads a page too late brings poison, and a write into a free page is found when the page is taken, or at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kv_transfer.api import (
    Fetch,
    HandoffId,
    Landed,
    Limits,
    LossReason,
    Lost,
    PortEvent,
    Safe,
    Sent,
    Unwanted,
    Wanted,
    prefix_hash,
)
from kv_transfer.endpoint import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.local import LocalNetwork
from kv_transfer.weather import Weather
from tests.unit.kv_transfer.pools import pool_view

POISON = 0xEE
MODEL_HEADS = 4
LAYOUT = KVLayout(layers=3, pages=16, kv_heads=MODEL_HEADS, page_size=4, head_dim=2, dtype_bytes=1)
LIMITS = Limits(heartbeat_s=0.25, silence_s=1.0, accept_s=1.0, lease_s=2.0, drain_s=0.5)
COMPUTE_S = 0.05  # of one block of one chunk
PROMPT = tuple(range(100, 123))
SLOW = Weather(latency_s=0.01, bytes_per_s=1000.0, note_s=0.01)  # a write takes longer than to compute what is in it


def kv_of(tokens: tuple[int, ...], layout: KVLayout) -> NDArray[np.uint8]:
    """[layer, key or value, token, the model's head, byte]: what any instance computes for this prompt."""
    seed = int(prefix_hash(tokens), 16)
    return np.random.default_rng(seed).integers(
        0, 0xE0, (layout.layers, 2, len(tokens), MODEL_HEADS, layout.head_dim), dtype=np.uint8
    )


@dataclass
class Export:
    """A prompt that P's engine computes: in chunks of tokens, each in blocks of layers."""

    wanted: Wanted
    pages: list[int]
    tokens: int = 0
    layers: int = 0
    stopped: bool = False


@dataclass
class Instance:
    """One start of an instance. `results`: the events of each handoff, as D's engine got them."""

    fleet: Fleet
    name: str
    layout: KVLayout
    checksum: bool
    chunk_tokens: int = 6
    block_layers: int = 2
    stuck: bool = False  # its engine
    device_s: float = 0.0  # of a block of its device; the engine says nothing meanwhile
    said_s: float = 0.0  # what it says that this may take
    dead: bool = False
    frozen: bool = False
    results: dict[HandoffId, list[PortEvent]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = np.full(self.layout.total_bytes, POISON, np.uint8)
        self.transport = self.fleet.network.add(self.name, self.layout, self.memory)
        self.endpoint = Endpoint(self.transport, LIMITS, checksum=self.checksum, clock=self.fleet.clock)
        self.view = pool_view(self.memory, self.layout)
        self.free = list(range(self.layout.pages))
        self.generations = [0] * self.layout.pages
        self.fetches: dict[HandoffId, Fetch] = {}  # whose pages are not free
        self.exports: dict[HandoffId, Export] = {}
        self.sent: list[Sent] = []
        self.due = 0.0
        self.silent_until = 0.0  # its engine waits for its device
        self._serial = 0

    # --- pages ---

    def take(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            assert (self.view[:, :, page] == POISON).all(), f"{self.name}: somebody wrote into free page {page}"
            self.generations[page] += 1
        return pages

    def give_up(self, pages: list[int] | tuple[int, ...]) -> None:
        for page in pages:
            self.view[:, :, page] = POISON
        self.free.extend(pages)

    # --- as D ---

    def fetch(self, peer: str, tokens: tuple[int, ...], start: int = 0, within: float = 10.0) -> HandoffId:
        pages = tuple(self.take(math.ceil((len(tokens) - start) / self.layout.page_size)))
        handoff = HandoffId(self.endpoint.epoch, self._serial)
        self._serial += 1
        generations = tuple(self.generations[page] for page in pages)
        fetch = Fetch(handoff, peer, tokens, start, pages, generations, self.fleet.clock() + within)
        self.fetches[handoff] = fetch
        self.results[handoff] = []
        self.endpoint.fetch(fetch)
        return handoff

    def check_landed(self, fetch: Fetch) -> None:
        kv = kv_of(fetch.tokens, self.layout)
        heads = range(self.layout.first_head, self.layout.first_head + self.layout.kv_heads)
        for token in range(fetch.start, len(fetch.tokens)):
            page, slot = divmod(token - fetch.start, self.layout.page_size)
            here = self.view[:, :, fetch.pages[page], :, slot]
            np.testing.assert_array_equal(here, kv[:, :, token, heads.start : heads.stop], f"{self.name}: token {token}")

    # --- as P ---

    def begin(self, wanted: Wanted) -> None:
        count = math.ceil(len(wanted.tokens) / self.layout.page_size)
        if count > len(self.free):
            self.endpoint.failed(wanted.handoff)
            self.exports[wanted.handoff] = Export(wanted, [], stopped=True)
        else:
            self.exports[wanted.handoff] = Export(wanted, self.take(count))
            self.launch()

    def launch(self) -> None:
        """Its device has work."""
        if self.device_s:
            self.endpoint.busy(self.said_s)
            self.due = self.silent_until = self.fleet.clock() + self.device_s

    def compute(self, export: Export) -> None:
        """One block of layers of one chunk."""
        self.due = self.fleet.clock() + COMPUTE_S
        size, tokens = self.layout.page_size, export.wanted.tokens
        chunk = range(export.tokens, min(export.tokens + self.chunk_tokens, len(tokens)))
        block = range(export.layers, min(export.layers + self.block_layers, self.layout.layers))
        kv = kv_of(tokens, self.layout)[:, :, :, self.layout.first_head : self.layout.first_head + self.layout.kv_heads]
        for token in chunk:
            self.view[block.start : block.stop, :, export.pages[token // size], :, token % size] = kv[
                block.start : block.stop, :, token
            ]
        export.layers = block.stop % self.layout.layers
        export.tokens = chunk.stop if export.layers == 0 else export.tokens
        pages = export.pages[chunk.start // size : math.ceil(chunk.stop / size)]
        self.endpoint.computed(export.wanted.handoff, block, chunk, pages)
        if self.computing:
            self.launch()

    # --- the engine ---

    def work(self) -> None:
        if self.stuck or self.fleet.clock() < self.silent_until:
            return
        for event in self.endpoint.poll():
            self.take_in(event)
        for export in self.exports.values():
            if not export.stopped and export.tokens < len(export.wanted.tokens) and self.fleet.clock() >= self.due:
                self.compute(export)

    def take_in(self, event: PortEvent) -> None:
        match event:
            case Wanted():
                self.begin(event)
            case Unwanted(handoff):
                self.exports[handoff].stopped = True
            case Sent(handoff):
                self.sent.append(event)
                self.give_up(self.exports.pop(handoff).pages)
            case Landed(handoff):
                self.results[handoff].append(event)
                self.check_landed(self.fetches[handoff])
                self.give_up(self.fetches.pop(handoff).pages)
            case Lost(handoff, _, safe):
                self.results[handoff].append(event)
                if safe:
                    self.give_up(self.fetches.pop(handoff).pages)
            case Safe(handoff):
                self.results[handoff].append(event)
                self.give_up(self.fetches.pop(handoff).pages)

    def check_deadlines(self) -> None:
        """None of its handoffs' passes unseen."""
        fetches, exports = self.endpoint._receivers, self.endpoint._senders
        assert fetches.deadline <= min((each.session.deadline for each in fetches._records.values()), default=math.inf)
        assert exports.deadline <= min((each.session.deadline for each in exports._records.values()), default=math.inf)

    @property
    def computing(self) -> bool:
        return not self.stuck and any(
            not export.stopped and export.tokens < len(export.wanted.tokens) for export in self.exports.values()
        )


class Fleet:
    """All that ever started, dead ones too. `checksum`: of all instances."""

    def __init__(self, weather: Weather | None = None, checksum: bool = False) -> None:
        self.now = 0.0
        self.checksum = checksum
        self.network = LocalNetwork(self.clock, weather)
        self.instances: list[Instance] = []

    def clock(self) -> float:
        return self.now

    def add(self, name: str, layout: KVLayout = LAYOUT) -> Instance:
        self.instances.append(Instance(self, name, layout, self.checksum))
        return self.instances[-1]

    def pair(self, p_layout: KVLayout = LAYOUT, d_layout: KVLayout = LAYOUT) -> tuple[Instance, Instance]:
        """P and D, connected."""
        p, d = self.add("P", p_layout), self.add("D", d_layout)
        d.endpoint.connect("P", "")
        self.run(0.1)
        return p, d

    def die(self, instance: Instance) -> None:
        instance.dead = True
        self.network.die(instance.transport)

    def freeze(self, instance: Instance) -> None:
        instance.frozen = True
        self.network.freeze(instance.transport)

    def thaw(self, instance: Instance) -> None:
        instance.frozen = False
        self.network.thaw(instance.transport)

    def run(self, seconds: float) -> None:
        """Lets `seconds` pass, from one thing that happens to the next."""
        end = self.now + seconds
        while True:
            due = end
            for instance in self.instances:
                if not instance.dead and not instance.frozen:
                    instance.endpoint.step()
                    instance.work()
                    due = min(due, instance.endpoint.step(), instance.due if instance.computing else end)
                    instance.check_deadlines()
            if self.now >= end:
                return
            self.now = max(self.now, min(due, self.network.next_due, end))

    def settle(self, seconds: float = 12.0) -> None:
        """No more faults, and time enough for every deadline; who is dead stays so."""
        self.network.weather = Weather()
        for one, other in (("P", "D"), ("Q", "D")):
            self.network.heal(one, other)
        for instance in self.instances:
            instance.stuck = False
            if instance.frozen:
                self.thaw(instance)
        self.run(seconds)

    def check(self) -> None:
        """Of everybody who lives: each handoff has ended as it should, and no page is lost or was written to while free."""
        for instance in self.instances:
            for handoff, events in instance.results.items() if not instance.dead else ():
                match [replace(e, reason=None) if isinstance(e, Lost) else e for e in events]:  # type: ignore[arg-type]
                    case [Landed()] | [Lost(safe=True)] | [Lost(safe=False), Safe()]:
                        pass
                    case _:
                        raise AssertionError(f"{instance.name}: {handoff} got {events}")
            if not instance.dead:
                assert instance.endpoint.idle
                assert instance.endpoint.stats.quarantined_pages == 0
                assert (instance.fetches, instance.exports) == ({}, {})
                assert sorted(instance.free) == list(range(instance.layout.pages)), instance.name
                assert (instance.memory == POISON).all(), f"{instance.name}: somebody wrote into a free page"


def reasons(instance: Instance, handoff: HandoffId) -> list[LossReason]:
    return [event.reason for event in instance.results[handoff] if isinstance(event, Lost)]


def lost(instance: Instance, handoff: HandoffId, reason: LossReason, safe: bool) -> bool:
    """Whether this is all that the engine has been told of the handoff."""
    return instance.results[handoff] == [Lost(handoff, reason, safe)]
