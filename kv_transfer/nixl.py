"""The Transport of real instances: frames over TCP (`control`), bytes over NIXL (`nixl_agent`, which says how NIXL behaves).

    connect ──► hello each way, with the NIXL agent of this connection ──► a note each way, answered by a frame WIRED ──► PeerUp
            ──► post, send ──► PeerDown, agent gone

When no write of a peer can land here any more (PeerFenced):
- its process has died (the kernel says so by a file, if both ends are on one kernel), or
- it connects again: before it says hello, it has ended the agent of the connection before, and all its writes with it, or
- it runs on another kernel and the agent here is gone, whoever has caused that.
So a peer that is frozen on the same kernel is fenced when it wakes up or dies: it could write past every door (CMA).
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.api import (
    Indices,
    Limits,
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
from kv_transfer.control import Lines
from kv_transfer.layout import KVLayout
from kv_transfer.line import Kind, Line
from kv_transfer.messages import Hello, MalformedError
from kv_transfer.nixl_agent import Agent, Pool, restrict_ucx_to
from kv_transfer.pace import Pace
from kv_transfer.plan import Rows, descriptors, grid
from kv_transfer.processes import death_of, kernel, started
from kv_transfer.tally import Tally

_PLACE = struct.Struct(">QqQ")  # of a pool, before the agent's metadata: address, device or -1, when its process started
_FIRST_NOTE = b"wired"  # all others are of writes
_left: list[Agent] = []  # that are never closed: their peers died, or the transport was closed, before UCX was through

log = logging.getLogger("kv_transfer")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this instance is. `compatibility`: see `messages.compatibility`. `secret`: one for the whole fleet."""

    name: str
    compatibility: str
    secret: str = field(repr=False)
    host: str = field(default_factory=lambda: kernel())


@dataclass(slots=True)
class _Peer:
    """One start of a peer that is up."""

    name: str
    line: Line
    epoch: int
    agent: Agent
    rows: Rows  # of this pool, on the grid of the pair
    layout: KVLayout
    since: float
    wired: bool = False  # UCX is known to reach it: PeerUp was said
    answered: bool = False  # it was told that its first note has come
    early: list[TransportEvent] = field(default_factory=list)  # of it, before PeerUp
    flights: dict[int, int] = field(default_factory=dict)  # handle -> number of the agent; posted and not over
    tally: Tally = field(default_factory=Tally)


class NixlTransport:
    """See `api.Transport`. A connection that begins takes 0.1 s of its thread, NIXL's setting up.

    `port` 0: any; `address` says which. Peers reach the instance at `host`.
    """

    def __init__(
        self,
        identity: Identity,
        layout: KVLayout,
        pool: Pool,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        if pool.size_bytes != layout.total_bytes:
            raise ValueError(f"the pool has {pool.size_bytes} bytes, its layout {layout.total_bytes}")
        self._identity = identity
        self._epoch = secrets.randbits(64)
        self._layout = layout
        self._pool = pool
        self._limits = limits or Limits()
        self._peers: dict[str, _Peer] = {}
        restrict_ucx_to(host)
        self._hellos = 0
        self._agents: dict[Line, Agent] = {}  # of lines that have been greeted
        self._spare: Agent | None = Agent(pool)  # the first of a process takes long: not when a peer waits
        self._processes: dict[tuple[str, int], int] = {}  # of peers on this kernel, by name and epoch -> pidfd
        self._unwired: dict[tuple[str, int], list[Agent]] = {}  # that cannot be closed before the peer has returned
        self._open_doors: set[tuple[str, int]] = set()  # peers whose agent here could not give the memory back
        self._events: deque[TransportEvent] = deque()
        self._broken: list[tuple[_Peer, TransportError]] = []
        self._handles = 0
        self._pace = Pace()
        self._closed = False
        try:
            self._lines = Lines(self, self._limits, host, port)
        except OSError:
            self._spare.close()
            raise

    @property
    def name(self) -> str:
        return self._identity.name

    @property
    def secret(self) -> str:
        return self._identity.secret

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def address(self) -> str:
        """For `connect` of the peers."""
        return self._lines.address

    def connect(self, peer: str, address: str) -> None:
        self._lines.dial(peer, address)

    def disconnect(self, peer: str) -> None:
        if (line := self._lines.get(peer)) is not None:
            self._lines.hang_up(line)

    def forget(self, peer: str) -> None:
        self._lines.forget(peer)
        self.disconnect(peer)

    def fence(self, peer: str, epoch: int) -> None:
        if peer in self._peers and self._peers[peer].epoch == epoch:
            self.disconnect(peer)
        if (peer, epoch) not in self._processes and (peer, epoch) not in self._open_doors:
            self._events.append(PeerFenced(peer, epoch))

    def send(self, peer: str, epoch: int, frame: bytes) -> None:
        self._lines.send(self._need(peer, epoch).line, Kind.MESSAGE, frame)

    def post(self, peer: str, epoch: int, write: Write) -> int:
        up = self._need(peer, epoch)
        self._handles += 1
        try:
            number = up.agent.post(write.local, write.remote, write.note)
        except TransportError as error:
            self._events.append(WriteDone(self._handles, ok=False))
            self._broken.append((up, error))
            return self._handles
        if number is None:
            self._done(up, self._handles)
            self._tell(up)
        else:
            up.flights[self._handles] = number
        return self._handles

    def cancel(self, handle: int) -> None:
        """A posted write cannot be called back: it ends by itself or by `disconnect` (see `nixl_agent`)."""

    def checksum(self, peer: str, indices: Indices) -> int:
        """Raises TransportError for a pool that is not in host memory."""
        return self._pool.checksum(self._need(peer).rows[indices])

    def poll(self) -> Sequence[TransportEvent]:
        if not self._closed:
            self._turn()
        events = list(self._events)
        self._events.clear()
        return events

    def wait(self, timeout_s: float) -> None:
        begun, look_s = time.monotonic(), 0.0
        while not (self._events or self._broken):
            waited = time.monotonic() - begun
            left = timeout_s - waited
            pause = self._pace.pause_s(waited, look_s, self._writes) if self._busy else left
            if left <= 0 or self._lines.wait(min(left, pause)):
                return
            looked = time.monotonic()
            self._look()
            look_s = time.monotonic() - looked

    def wake(self) -> None:
        self._lines.wake()

    def close(self) -> None:
        """A peer on this kernel whose process lives keeps its right to write: no PeerFenced is said of it any more."""
        if self._closed:
            return
        self._closed = True
        self._lines.close()
        for pidfd in self._processes.values():
            os.close(pidfd)
        for agents in self._unwired.values():
            _left.extend(agents)
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    # --- for the lines ---

    def greet(self, line: Line) -> Hello:
        self._agents[line] = agent = self._spare or Agent(self._pool)
        self._spare = None
        device = -1 if self._pool.device is None else self._pool.device
        place = _PLACE.pack(self._pool.address, device, started(os.getpid()))
        self._hellos += 1
        return self._hello(self._hellos, place + agent.metadata)

    def check(self, hello: Hello) -> None:
        self._hello(0, b"").check(hello)
        grid(self._layout, hello.layout)

    def joined(self, line: Line) -> None:
        hello, agent = line.hello, self._agents[line]
        assert hello is not None
        if len(hello.agent) <= _PLACE.size:
            raise MalformedError("a Hello without the place of a pool")
        address, device, since = _PLACE.unpack_from(hello.agent)
        pool = Pool(address, hello.layout.total_bytes, None, None if device < 0 else device)
        cut = grid(self._layout, hello.layout)
        rows = descriptors(self._layout, cut)
        key = (line.peer, hello.epoch)
        before = key in self._processes or key in self._open_doors
        if key not in self._processes and hello.host == self._identity.host:
            self._watch(key, hello.pid, since)  # before there is anything that a frozen peer could hold
        agent.reach(hello.agent[_PLACE.size :], pool, rows, descriptors(hello.layout, cut))
        if before:
            self._fenced(key)  # of its connection before: see the module
        self._peers[line.peer] = _Peer(line.peer, line, hello.epoch, agent, rows, hello.layout, time.monotonic())
        agent.note(_FIRST_NOTE)

    def parted(self, line: Line, was_up: bool) -> None:
        agent = self._agents.pop(line, None)
        up = self._peers.get(line.peer)
        if up is None or up.line is not line:
            if agent is not None:
                agent.close()  # it has reached for nobody
            return
        if not up.wired:
            self._part_unwired(up)
            return
        closed = up.agent.close()
        if not closed:
            log.error("NIXL has not given back the memory that %s can write into: pages that it has stay its own", up.name)
            self._open_doors.add((up.name, up.epoch))
        del self._peers[line.peer]
        self._events.extend(WriteDone(handle, ok=False) for handle in up.flights)
        self._events.append(PeerDown(up.name, up.epoch))

    def heard(self, line: Line, kind: int, body: bytes) -> None:
        up = self._peers[line.peer]
        if kind == Kind.MESSAGE:
            self._say(up, Received(up.name, up.epoch, body))
        elif kind == Kind.WIRED and not body and not up.wired:
            up.wired = True
            self._events.append(PeerUp(up.name, up.epoch, up.layout))
            self._events.extend(up.early)
        elif kind == Kind.WRITTEN:
            up.tally.hear(body, time.monotonic())
        else:
            raise MalformedError(f"a frame of kind {kind} with {len(body)} bytes")

    def refused(self, who: str, why: str) -> None:
        log.warning("%s is refused: %s", who, why)
        self._events.append(PeerRefused(who, why))

    # --- its own ---

    def _hello(self, number: int, agent: bytes) -> Hello:
        me = self._identity
        return Hello(me.compatibility, me.name, self._epoch, number, self._layout, me.host, os.getpid(), agent)

    @property
    def _busy(self) -> bool:
        """Whether something may be over that only a look at NIXL shows."""
        return any(up.flights or up.tally.looks or not (up.wired and up.answered) for up in self._peers.values())

    @property
    def _writes(self) -> bool:
        return any(up.flights for up in self._peers.values())

    def _turn(self) -> None:
        self._lines.turn()
        self._look()
        broken, self._broken = self._broken, []
        for up, error in broken:
            log.warning("the connection to %s is closed: %s", up.name, error)
            self._lines.hang_up(up.line)

    def _look(self) -> None:
        """Takes in writes that are over and notes that have come."""
        for up in self._peers.values():
            now = time.monotonic()
            try:
                for handle, number in tuple(up.flights.items()):
                    if up.agent.is_done(number):
                        del up.flights[handle]
                        self._done(up, handle)
                self._tell(up)
                for note in up.agent.notes():
                    self._take_note(up, note)
                if not up.wired and now > up.since + self._limits.silence_s:
                    raise TransportError("UCX does not reach it")
                if (trouble := up.tally.overdue(now, self._limits.silence_s)) is not None:
                    raise TransportError(trouble)
            except TransportError as error:
                self._broken.append((up, error))

    def _take_note(self, up: _Peer, note: bytes) -> None:
        if note == _FIRST_NOTE:
            up.answered = True
            self._lines.send(up.line, Kind.WIRED, b"")
            return
        up.tally.note(time.monotonic())
        self._say(up, Notified(up.name, up.epoch, note))

    def _say(self, up: _Peer, event: TransportEvent) -> None:
        """Of a peer, and so after its PeerUp."""
        (self._events if up.wired else up.early).append(event)

    def _part_unwired(self, up: _Peer) -> None:
        """Ending an agent waits for UCX's connections that are being made, and stops the whole process meanwhile: for ever, if
        the peer is frozen. So that waits until it has returned; no write ever went over it."""
        log.warning("the connection to %s ends before UCX was through", up.name)
        del self._peers[up.name]
        self._unwired.setdefault((up.name, up.epoch), []).append(up.agent)
        self._open_doors.add((up.name, up.epoch))

    def _fenced(self, key: tuple[str, int]) -> None:
        for agent in self._unwired.pop(key, ()):
            agent.close()
        self._open_doors.discard(key)
        self._events.append(PeerFenced(*key))

    def _done(self, up: _Peer, handle: int) -> None:
        up.tally.end()
        self._events.append(WriteDone(handle, ok=True))

    def _tell(self, up: _Peer) -> None:
        """The peer, of writes that are over."""
        frame = up.tally.frame()
        if frame is None:
            return
        try:
            self._lines.send(up.line, Kind.WRITTEN, frame)
        except TransportError as error:
            self._broken.append((up, error))

    def _need(self, peer: str, epoch: int | None = None) -> _Peer:
        up = self._peers.get(peer)
        if up is None or not up.wired or epoch not in (None, up.epoch):
            raise TransportError(f"{peer} (this start of it) is not connected to {self.name}; wait for PeerUp")
        return up

    def _watch(self, key: tuple[str, int], pid: int, since: int) -> None:
        """Says when the process of a peer on this kernel has died."""
        pidfd = death_of(pid, since)
        if pidfd is not None:
            self._processes[key] = pidfd
            self._lines.watch(pidfd, lambda: self._died(key))

    def _died(self, key: tuple[str, int]) -> None:
        pidfd = self._processes.pop(key)
        self._lines.unwatch(pidfd)
        os.close(pidfd)
        if key[0] in self._peers and self._peers[key[0]].epoch == key[1]:
            self.disconnect(key[0])
        _left.extend(self._unwired.pop(key, ()))
        self._fenced(key)
