"""P's half of an endpoint: its sender sessions, and what they ask for carried out. Called by the endpoint's thread only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.api import (
    FenceReason,
    HandoffId,
    Indices,
    LossReason,
    PortEvent,
    Sent,
    Ticket,
    TransportError,
    Unwanted,
    Wanted,
    Write,
    prefix_hash,
)
from kv_transfer.layout import KVLayout
from kv_transfer.links import Link, Links
from kv_transfer.messages import Cancel, Ended, Note, encode
from kv_transfer.plan import deeper, indices, misfit
from kv_transfer.session import Action, CancelWrites, Disconnect, Emit, Push, Sender, SenderState, Tell

MAX_KNOWN = 1024  # peers whose serials are remembered while they are not heard


@dataclass(frozen=True, slots=True)
class _Top:
    """Descriptors of both pools for so many layers from the first on; the next block of layers has the same, further down."""

    layers: int
    tokens: range
    pages: tuple[int, ...]
    local: Indices
    remote: Indices


@dataclass(slots=True)
class _Record:
    session: Sender
    peer: str
    epoch: int
    handles: dict[int, int] = field(default_factory=dict)  # of a push -> of its write
    top: _Top | None = None  # of the last push


@dataclass(frozen=True, slots=True)
class _Posted:
    handoff: HandoffId
    number: int  # of the push
    since: float
    bytes: int


class Senders:
    """`emit` takes what the engine is to know."""

    def __init__(self, links: Links, emit: Callable[[PortEvent], None]) -> None:
        self._links = links
        self._layout: KVLayout = links.transport.layout
        self._stats = links.stats
        self._emit = emit
        self._records: dict[HandoffId, _Record] = {}
        self._due = math.inf  # as of `Receivers`
        self._posted: dict[int, _Posted] = {}  # by the handle of the write
        # peer -> (its epoch, the highest serial of its tickets and cancels), of the MAX_KNOWN peers heard last
        self._last: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def deadline(self) -> float:
        """When `tick` is due; maybe earlier than any session asks for."""
        return self._due

    def pushing(self, link: Link, alive: bool) -> tuple[int, ...]:
        """Serials that are written for this peer, or computed by an engine that is `alive`."""
        ours = (record.session for record in self._of(link.peer, link.epoch))
        return tuple(s.handoff.serial for s in ours if alive or s.state is SenderState.DRAINING)

    def asked(self, link: Link, ticket: Ticket, now: float, deaf: bool = False) -> None:
        """A ticket has come: takes it on, or says why not. `deaf`: the engine does not listen."""
        handoff = ticket.handoff
        if handoff.decode_epoch != link.epoch:
            self._stats.fenced[FenceReason.STALE_EPOCH] += 1
            return
        if not self._is_new(link, handoff.serial):
            self._stats.fenced[FenceReason.REPLAYED] += 1
            return
        refusal = self._refusal(link, ticket, deaf)
        if refusal is not None:
            self._links.tell(link.peer, link.epoch, Ended(handoff.serial, refusal))
            return
        session = Sender(ticket, self._layout.layers, self._layout.page_size, link.grid.group_slots, self._links.limits, now)
        record = self._records[handoff] = _Record(session, link.peer, link.epoch)
        self._do(record, session.start(link.peer), now)

    def cancelled(self, link: Link, cancel: Cancel, now: float) -> None:
        """Answered by Ended: now if nothing is in flight, for an unknown handoff too, else once nothing is."""
        self._is_new(link, cancel.serial)  # its ticket, should it still come, is refused
        record = self._records.get(HandoffId(link.epoch, cancel.serial))
        if record is None:
            self._links.tell(link.peer, link.epoch, Ended(cancel.serial, LossReason.DROPPED))
        else:
            self._do(record, record.session.stop(LossReason.DROPPED, now), now)

    def renewed(self, link: Link, serials: tuple[int, ...], now: float) -> None:
        for serial in serials:
            record = self._records.get(HandoffId(link.epoch, serial))
            if record is not None:
                self._do(record, record.session.renewed(now), now)

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int], now: float) -> None:
        record = self._records.get(handoff)
        if record is not None:
            self._do(record, record.session.computed(layers, tokens, pages, now), now)

    def stop(self, handoff: HandoffId, reason: LossReason, now: float) -> None:
        """The engine ends it."""
        record = self._records.get(handoff)
        if record is not None:
            self._do(record, record.session.stop(reason, now, told=True), now)

    def written(self, handle: int, ok: bool, now: float) -> None:
        posted = self._posted.pop(handle, None)
        if posted is None:
            return
        self._stats.writes += 1
        if ok:
            self._stats.written_bytes += posted.bytes
            self._stats.written_s += now - posted.since
        else:
            self._stats.writes_failed += 1
        record = self._records[posted.handoff]
        del record.handles[posted.number]
        self._do(record, record.session.written(posted.number, ok, now), now)

    def peer_down(self, peer: str, epoch: int, reason: LossReason, now: float) -> None:
        for record in self._of(peer, epoch):
            self._do(record, record.session.peer_down(reason, now), now)

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        for record in tuple(self._records.values()):
            self._do(record, record.session.tick(now), now)
        self._due = min((record.session.deadline for record in self._records.values()), default=math.inf)

    def close(self, now: float) -> None:
        """The transport is closed: no write is in flight any more."""
        for record in tuple(self._records.values()):
            self._do(record, record.session.stop(LossReason.DROPPED, now), now)
        for handle in tuple(self._posted):
            self.written(handle, False, now)

    def _is_new(self, link: Link, serial: int) -> bool:
        """Whether it is above all serials seen of this start of the peer; and notes it."""
        epoch, last = self._last.pop(link.peer, (link.epoch, -1))
        if epoch != link.epoch:
            last = -1
        self._last[link.peer] = (link.epoch, max(last, serial))
        if len(self._last) > MAX_KNOWN:
            del self._last[next(iter(self._last))]
        return serial > last

    def _refusal(self, link: Link, ticket: Ticket, deaf: bool) -> LossReason | None:
        fence: FenceReason
        if ticket.prefill_epoch != self._links.transport.epoch:
            fence, answer = FenceReason.STALE_EPOCH, LossReason.PEER_RESTARTED
        elif ticket.prefix_hash != prefix_hash(ticket.tokens):
            fence, answer = FenceReason.PREFIX_MISMATCH, LossReason.STALE_PAGES
        elif misfit(link.layout, len(ticket.tokens), ticket.start, ticket.pages, ticket.generations) is not None:
            fence, answer = FenceReason.MALFORMED, LossReason.STALE_PAGES
        elif ticket.seconds <= 0:
            fence, answer = FenceReason.EXPIRED, LossReason.DEADLINE
        else:
            full = len(self._of(link.peer, link.epoch)) >= self._links.limits.max_handoffs
            return LossReason.PEER_BUSY if deaf or full else None
        self._stats.fenced[fence] += 1
        return answer

    def _of(self, peer: str, epoch: int) -> list[_Record]:
        return [record for record in self._records.values() if record.peer == peer and record.epoch == epoch]

    def _do(self, record: _Record, actions: list[Action], now: float) -> None:
        left = deque(actions)
        while left:
            match left.popleft():
                case Tell(message):
                    self._links.tell(record.peer, record.epoch, message)
                case Push() as push:
                    left.extend(self._post(record, push, now))
                case CancelWrites(numbers):
                    for number in numbers:
                        if number in record.handles:
                            self._links.transport.cancel(record.handles[number])
                case Disconnect():
                    self._links.transport.disconnect(record.peer)
                case Emit(event):
                    self._count(record, event)
                    self._emit(event)
        self._due = min(self._due, record.session.deadline)

    def _post(self, record: _Record, push: Push, now: float) -> list[Action]:
        """Posts the write, unless the session has stopped since it asked. What follows if it cannot be posted."""
        session, ticket = record.session, record.session.ticket
        link = self._links.get(record.peer, record.epoch)
        if link is None or session.state is not SenderState.PUSHING:
            return session.written(push.number, False, now)
        transport = self._links.transport
        local, remote = self._indices(record, link, push)
        try:
            checksum = transport.checksum(record.peer, local) if ticket.checksum else None
            note = encode(Note(ticket.handoff.serial, session.digest, push.layers, push.tokens, checksum))
            handle = transport.post(record.peer, record.epoch, Write(local, remote, note))
        except TransportError:
            self._stats.writes_failed += 1
            return session.written(push.number, False, now)
        record.handles[push.number] = handle
        size = len(local) * link.grid.descriptor_bytes(self._layout)
        self._posted[handle] = _Posted(ticket.handoff, push.number, now, size)
        return []

    def _indices(self, record: _Record, link: Link, push: Push) -> tuple[Indices, Indices]:
        """Of both pools, what the push writes."""
        top, ticket, layers = record.top, record.session.ticket, len(push.layers)
        if top is None or (top.layers, top.tokens, top.pages) != (layers, push.tokens, push.pages):
            local = indices(self._layout, link.grid, push.pages, range(layers), push.tokens, push.origin)
            remote = indices(link.layout, link.grid, ticket.pages, range(layers), push.tokens, ticket.start)
            top = record.top = _Top(layers, push.tokens, push.pages, local, remote)
        first = push.layers.start
        return deeper(self._layout, link.grid, top.local, first), deeper(link.layout, link.grid, top.remote, first)

    def _count(self, record: _Record, event: PortEvent) -> None:
        """Keeps the counters, and forgets a record with its last event."""
        match event:
            case Wanted():
                self._stats.wanted += 1
            case Sent(handoff, complete):
                if complete:
                    self._stats.sent += 1
                else:
                    self._stats.unsent[record.session.reason] += 1
                del self._records[handoff]
            case Unwanted():
                pass
