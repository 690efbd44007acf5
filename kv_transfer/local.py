"""A transport within one process: real bytes, any clock, and faults on demand. For simulation and for tests without NIXL.

A `LocalNetwork` joins the `LocalTransport`s of several instances. Their writes share each instance's link (`pipe`). A write's
bytes move in two halves, at half of its time and at its end, and the source is read at both: a page that its owner gives up too
early is seen as wrong bytes. `Weather` says how long things take and which writes go wrong. Instances and lines go wrong by a
call: `die`, `freeze`, `cut`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_transfer.api import (
    Indices,
    Notified,
    PeerDown,
    PeerFenced,
    PeerRefused,
    PeerUp,
    Received,
    TransportError,
    TransportEvent,
    Write,
    WriteDone,
)
from kv_transfer.layout import KVLayout
from kv_transfer.pipe import Pipe, carry
from kv_transfer.plan import LayoutMismatchError, Rows, descriptors, grid
from kv_transfer.weather import Weather

Memory: TypeAlias = NDArray[np.uint8]

RETRY_S = 0.01  # from the loss of a connection to the next attempt


@dataclass(eq=False, slots=True)
class _Wire:
    """A connection between two starts of two instances. An end that is down is never up again."""

    ends: tuple[LocalTransport, LocalTransport]
    up: set[LocalTransport]
    writers: set[LocalTransport]  # whose writes land at the other end, even late ones
    arrival: dict[LocalTransport, float] = field(default_factory=dict)  # of the last frame sent by: frames keep their order

    def other(self, end: LocalTransport) -> LocalTransport:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


@dataclass(eq=False, slots=True)
class _Flight:
    """A write that is not over."""

    handle: int
    wire: _Wire
    write: Write
    source: LocalTransport
    target: LocalTransport


class LocalNetwork:
    """The instances by name, what is on its way between them, and its faults. Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], weather: Weather | None = None) -> None:
        self.clock = clock
        self.weather = weather or Weather()
        self.can_revoke = False  # whether `Transport.fence` works on a peer that is not dead
        self.lock = threading.RLock()
        self.wires: list[_Wire] = []
        self._instances: dict[str, LocalTransport] = {}  # the newest start of each
        self.waiting: set[LocalTransport] = set()  # their threads sleep, until something is due or comes
        self._cut: set[frozenset[str]] = set()
        self._due: list[tuple[float, int, Callable[[], bool]]] = []  # a heap; an act that cannot be done yet says False
        self._held: list[Callable[[], bool]] = []  # what could not be done, until something changes
        self._order = itertools.count()
        self._epochs = itertools.count(1)

    def add(self, name: str, layout: KVLayout, memory: Memory | None) -> LocalTransport:
        """A new start of the instance `name`. `memory`: its pool of layout.total_bytes; None to move no bytes."""
        with self.lock:
            self._instances[name] = LocalTransport(self, name, next(self._epochs), layout, memory)
            self.retry()
            return self._instances[name]

    def die(self, instance: LocalTransport) -> None:
        """Its process is killed: its writes stop where they are; its peers notice after `Weather.notice_s`."""
        with self.lock:
            self.deliver()
            instance.dead = True
            self.after(self.weather.notice_s, lambda: self.bury(instance))

    def freeze(self, instance: LocalTransport) -> None:
        """It takes in nothing, and writes from and to it rest, until `thaw`. Do not step its endpoint meanwhile."""
        with self.lock:
            self.deliver()
            instance.frozen = True

    def thaw(self, instance: LocalTransport) -> None:
        with self.lock:
            instance.frozen = False
            self.retry()

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between the two until `heal`, and neither is told."""
        with self.lock:
            self.deliver()
            self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        with self.lock:
            self._cut.discard(frozenset((one, other)))
            self.retry()

    @property
    def next_due(self) -> float:
        return self._due[0][0] if self._due else math.inf

    # --- for transports, which hold the lock ---

    def at(self, time: float, act: Callable[[], bool]) -> None:
        heapq.heappush(self._due, (time, next(self._order), act))
        for instance in self.waiting:
            instance.wake()  # what it waits for may now come sooner

    def after(self, seconds: float, act: Callable[[], bool]) -> None:
        self.at(self.clock() + seconds, act)

    def deliver(self) -> None:
        while self.next_due <= self.clock():
            act = heapq.heappop(self._due)[2]
            if not act():
                self._held.append(act)

    def retry(self) -> None:
        """What could not be done may be possible now."""
        held, self._held = self._held, []
        for act in held:
            self.after(0.0, act)

    def passes(self, wire: _Wire) -> bool:
        return frozenset(end.name for end in wire.ends) not in self._cut

    def join(self, one: LocalTransport, name: str) -> bool:
        """Connects `one` to the present start of `name`. False: not now."""
        other = self._instances.get(name)
        if one.dead or self._instances[one.name] is not one:
            return True
        if other is None or other.dead or one.frozen or other.frozen:
            return False
        wire = _Wire((one, other), up={one, other}, writers={one, other})
        if not self.passes(wire):
            return False
        try:
            grid(one.layout, other.layout)
        except LayoutMismatchError as error:
            one.push(PeerRefused(other.name, str(error)))
            other.push(PeerRefused(one.name, str(error)))
            return True
        old = [w for w in self.wires if w.up and {end.name for end in w.ends} == {one.name, name}]
        if any(w.up == {one, other} for w in old):
            return True
        for before in old:
            for end in before.ends:
                end.down(before)
        self.wires.append(wire)
        one.joined(wire)
        other.joined(wire)
        return True

    def bury(self, instance: LocalTransport) -> bool:
        """All who had to do with a dead instance learn of it."""
        mine = [wire for wire in self.wires if instance in wire.ends]
        self.wires = [wire for wire in self.wires if wire not in mine]
        for wire in mine:
            wire.writers.clear()
            wire.other(instance).down(wire)
        for peer in {wire.other(instance) for wire in mine}:
            peer.push(PeerFenced(instance.name, instance.epoch))
        return True


class LocalTransport:
    """See `Transport`. Made by `LocalNetwork.add`."""

    def __init__(self, network: LocalNetwork, name: str, epoch: int, layout: KVLayout, memory: Memory | None) -> None:
        self.name = name
        self.memory = memory
        self.dead = False
        self.outgoing, self.incoming = Pipe(), Pipe()
        self.frozen = self._closed = self._woken = False
        self._network = network
        self._epoch = epoch
        self._layout = layout
        self._events: deque[TransportEvent] = deque()
        self._wires: dict[str, _Wire] = {}  # those that are up for this end
        self._wanted: set[str] = set()  # peers to connect to, again and again
        self._flights: dict[int, _Flight] = {}
        self._rows: dict[KVLayout, Rows] = {}  # of this pool, on the grid of a pair
        self._handles = itertools.count()
        self._awake = threading.Condition(network.lock)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def connect(self, peer: str, address: str) -> None:
        """`address` is not needed: the network knows its instances by name."""
        with self._network.lock:
            self._wanted.add(peer)
            self._network.after(self._network.weather.latency_s, lambda: self._network.join(self, peer))

    def disconnect(self, peer: str) -> None:
        with self._network.lock:
            if peer in self._wires:
                self._hang_up(self._wires[peer])

    def forget(self, peer: str) -> None:
        with self._network.lock:
            self._wanted.discard(peer)
            self.disconnect(peer)

    def fence(self, peer: str, epoch: int) -> None:
        with self._network.lock:
            wires = [w for w in self._network.wires if self in w.ends and w.other(self).epoch == epoch]
            if (wires or self._closed) and not self._network.can_revoke:
                return
            for wire in wires:
                wire.writers.discard(wire.other(self))
                self._hang_up(wire)
            self.push(PeerFenced(peer, epoch))

    def send(self, peer: str, epoch: int, frame: bytes) -> None:
        with self._network.lock:
            wire = self._need(peer, epoch)
            arrival = max(wire.arrival.get(self, 0.0), self._network.clock() + self._network.weather.latency_s)
            wire.arrival[self] = arrival
            self._network.at(arrival, lambda: self._arrive(wire, Received(self.name, self._epoch, frame)))

    def post(self, peer: str, epoch: int, write: Write) -> int:
        with self._network.lock:
            wire = self._need(peer, epoch)
            flight = _Flight(next(self._handles), wire, write, self, wire.other(self))
            self._flights[flight.handle] = flight
            weather = self._network.weather
            seconds = len(write.local) * int(self._cut_for(flight.target)[0, 1]) / weather.bytes_per_s
            half_s, end_s = carry(self.outgoing, flight.target.incoming, self._network.clock(), seconds)
            half = len(write.local) // 2
            self._network.at(half_s + weather.latency_s, lambda: self._move(flight, slice(half), last=False))
            self._network.at(end_s + weather.latency_s, lambda: self._move(flight, slice(half, None), last=True))
            return flight.handle

    def cancel(self, handle: int) -> None:
        with self._network.lock:
            if handle in self._flights:
                self._end(self._flights[handle], ok=False)

    def checksum(self, peer: str, indices: Indices) -> int:
        with self._network.lock:
            at = _bytes_of(self._cut_for(self._need(peer).other(self)), indices)
            return 0 if self.memory is None else zlib.crc32(self.memory[at].tobytes())

    def poll(self) -> Sequence[TransportEvent]:
        with self._network.lock:
            self._network.deliver()
            if self.frozen or (self.dead and not self._closed):
                return []
            events, self._events = self._events, deque()
            return events

    def wait(self, timeout_s: float) -> None:
        with self._network.lock:
            if not (self._events or self._woken):
                until_due = max(0.0, self._network.next_due - self._network.clock())
                self._network.waiting.add(self)
                self._awake.wait(min(timeout_s, until_due))
                self._network.waiting.discard(self)
            self._woken = False

    def wake(self) -> None:
        with self._network.lock:
            self._woken = True  # also for a `wait` that is still to begin
            self._awake.notify_all()

    def close(self) -> None:
        with self._network.lock:
            for flight in tuple(self._flights.values()):
                self._end(flight, ok=False)
            for wire in tuple(self._wires.values()):
                self.down(wire)
            self.dead = self._closed = True
            self._network.bury(self)

    @property
    def has_events(self) -> bool:
        """Whether `poll` would answer any, besides what is due."""
        return bool(self._events)

    # --- for the network, which holds the lock ---

    def push(self, event: TransportEvent) -> None:
        with self._network.lock:
            self._events.append(event)
            self._awake.notify_all()

    def joined(self, wire: _Wire) -> None:
        other = wire.other(self)
        self._wires[other.name] = wire
        self.push(PeerUp(other.name, other.epoch, other.layout))

    def down(self, wire: _Wire) -> bool:
        """This end of a connection ends. What a frozen end has in flight is not its own to end: it may land late."""
        if self not in wire.up:
            return True
        wire.up.discard(self)
        other = wire.other(self)
        del self._wires[other.name]
        if not self.frozen:
            for flight in [f for f in self._flights.values() if f.wire is wire]:
                self._end(flight, ok=False)
        self.push(PeerDown(other.name, other.epoch))
        if other.name in self._wanted:
            self._network.after(RETRY_S, lambda: self._network.join(self, other.name))
        return True

    def _hang_up(self, wire: _Wire) -> None:
        """The other end learns of it when it can."""
        self.down(wire)
        other = wire.other(self)
        self._network.after(self._network.weather.latency_s, lambda: self._network.passes(wire) and other.down(wire))

    def _need(self, peer: str, epoch: int | None = None) -> _Wire:
        wire = self._wires.get(peer)
        if wire is None or epoch not in (None, wire.other(self).epoch):
            raise TransportError(f"{peer} (this start of it) is not connected to {self.name}; wait for PeerUp")
        return wire

    def _arrive(self, wire: _Wire, event: TransportEvent) -> bool:
        """At the other end. False while the line is cut."""
        if not self._network.passes(wire):
            return False
        other = wire.other(self)
        if other in wire.up:
            other.push(event)
        return True

    def _move(self, flight: _Flight, part: slice, last: bool) -> bool:
        """Half of a write. False while one of its ends is frozen or the line is cut."""
        if flight.handle not in self._flights or self.dead or flight.target.dead:
            return True
        if self.frozen or flight.target.frozen or not self._network.passes(flight.wire):
            return False
        if self not in flight.wire.writers:
            self._end(flight, ok=False)
            return True
        weather = self._network.weather
        whole = not (weather.tear or weather.fail)
        if whole or not last:
            self._copy(flight, part)
        if last:
            note = Notified(self.name, self._epoch, flight.write.note)
            for _ in range(0 if weather.fail else weather.notes):
                self._network.after(weather.note_s, lambda: self._arrive(flight.wire, note))
            self._end(flight, ok=not weather.fail)
        return True

    def _copy(self, flight: _Flight, part: slice) -> None:
        if self.memory is not None and flight.target.memory is not None:
            source = _bytes_of(self._cut_for(flight.target), flight.write.local[part])
            target = _bytes_of(flight.target._cut_for(self), flight.write.remote[part])
            flight.target.memory[target] = self.memory[source]

    def _end(self, flight: _Flight, ok: bool) -> None:
        del self._flights[flight.handle]
        self.push(WriteDone(flight.handle, ok))

    def _cut_for(self, other: LocalTransport) -> Rows:
        if other.layout not in self._rows:
            self._rows[other.layout] = descriptors(self._layout, grid(self._layout, other.layout))
        return self._rows[other.layout]


def _bytes_of(rows: Rows, indices: Indices) -> NDArray[np.uint64]:
    """Where the bytes of these descriptors are in their pool, one after the other."""
    at: NDArray[np.uint64] = rows[indices, 0][:, None] + np.arange(rows[0, 1], dtype=np.uint64)
    return at.reshape(-1)
