"""D's half of an endpoint: its receiver sessions, and what they ask for carried out. Called by the endpoint's thread only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.api import Fetch, HandoffId, Landed, LossReason, Lost, PortEvent, Safe, Ticket, TransportError, prefix_hash
from kv_transfer.layout import KVLayout
from kv_transfer.links import Link, Links
from kv_transfer.messages import Accepted, Ended, Note
from kv_transfer.plan import Grid, count, indices
from kv_transfer.session import Action, Emit, Fence, Receiver, Tell


@dataclass(slots=True)
class _Record:
    session: Receiver
    peer: str
    epoch: int
    grid: Grid
    since: float
    lost: float = 0.0  # since when in quarantine
    bytes: int = 0  # that have landed


class Receivers:
    """`emit` takes what the engine is to know. `checksum`: have every note checked against what has landed."""

    def __init__(self, links: Links, emit: Callable[[PortEvent], None], checksum: bool) -> None:
        self._links = links
        self._layout: KVLayout = links.transport.layout
        self._stats = links.stats
        self._emit = emit
        self._checksum = checksum
        self._records: dict[int, _Record] = {}  # by serial
        self._due = math.inf  # no session's deadline is before it: most steps look at none of them

    def __len__(self) -> int:
        return len(self._records)

    @property
    def deadline(self) -> float:
        """When `tick` is due; maybe earlier than any session asks for."""
        return self._due

    def has(self, peer: str) -> bool:
        """Whether a handoff with any start of this peer has not ended here."""
        return any(record.peer == peer for record in self._records.values())

    def fetching(self, link: Link) -> tuple[int, ...]:
        """Serials of this peer's handoffs that have not ended here."""
        return tuple(serial for serial, _ in self._of(link.peer, link.epoch))

    def fetch(self, fetch: Fetch, now: float) -> None:
        """Sends the peer a ticket. One that cannot be asked is a Lost at once, whose pages are safe."""
        self._stats.fetched += 1
        link = self._links.get(fetch.peer)
        if link is None:
            known = fetch.peer in self._links.refused
            return self._refuse(fetch.handoff, LossReason.PEER_INCOMPATIBLE if known else LossReason.PEER_UNKNOWN)
        if link.grid.heads < self._layout.kv_heads:  # KV of a prompt comes from one peer
            return self._refuse(fetch.handoff, LossReason.PEER_INCOMPATIBLE)
        if len(fetch.tokens) > self._links.limits.max_prompt_tokens:
            return self._refuse(fetch.handoff, LossReason.TOO_LONG)
        if now >= fetch.deadline:
            return self._refuse(fetch.handoff, LossReason.DEADLINE)
        if len(self._of(link.peer, link.epoch)) >= self._links.limits.max_handoffs:
            return self._refuse(fetch.handoff, LossReason.PEER_BUSY)
        ticket = Ticket(
            *(fetch.handoff, link.epoch, fetch.tokens, fetch.start, fetch.pages, fetch.generations),
            *(prefix_hash(fetch.tokens), fetch.deadline - now, self._checksum),
        )
        if not self._links.tell(link.peer, link.epoch, ticket):
            return self._refuse(fetch.handoff, LossReason.PEER_DEAD)
        session = Receiver(ticket, self._layout.layers, link.grid.group_slots, fetch.deadline, self._links.limits, now)
        self._records[fetch.handoff.serial] = _Record(session, link.peer, link.epoch, link.grid, now)
        self._due = min(self._due, session.deadline)
        return None

    def drop(self, handoff: HandoffId, now: float) -> None:
        record = self._records.get(handoff.serial)
        if record is not None:
            self._do(record, record.session.lose(LossReason.DROPPED, now), now)

    def answered(self, link: Link, message: Accepted | Ended, now: float) -> bool:
        """Whether there is such a handoff."""
        record = self._get(link, message.serial)
        if record is None:
            return False
        if isinstance(message, Accepted):
            self._do(record, record.session.accepted(message.digest, now), now)
        else:
            self._do(record, record.session.ended(message.reason), now)
        return True

    def renewed(self, link: Link, serials: tuple[int, ...], now: float) -> None:
        for serial in serials:
            record = self._get(link, serial)
            if record is not None:
                self._do(record, record.session.renewed(now), now)

    def noted(self, link: Link, note: Note, now: float) -> bool:
        """Whether there is such a handoff."""
        record = self._get(link, note.serial)
        if record is None:
            return False
        refused = record.session.fence(note)
        if refused is not None:
            self._stats.fenced[refused] += 1
        try:
            intact = refused is not None or self._take(record, note)
        except TransportError:  # PeerDown is the next to come
            return True
        self._do(record, record.session.noted(note, intact, now), now)
        return True

    def _take(self, record: _Record, note: Note) -> bool:
        """Counts what a valid note says has landed. Whether the checksum is right, where one is asked for."""
        ticket = record.session.ticket
        descriptors = count(record.grid, note.layers, note.tokens)
        record.bytes += descriptors * record.grid.descriptor_bytes(self._layout)
        if not ticket.checksum:
            return True
        index = indices(self._layout, record.grid, ticket.pages, note.layers, note.tokens, ticket.start)
        return note.checksum == self._links.transport.checksum(record.peer, index)

    def peer_down(self, peer: str, epoch: int, reason: LossReason, now: float) -> None:
        for _, record in self._of(peer, epoch):
            self._do(record, record.session.peer_down(reason, now), now)

    def peer_up(self, link: Link, now: float) -> None:
        for _, record in self._of(link.peer, link.epoch):
            self._do(record, record.session.peer_up(), now)

    def fenced(self, peer: str, epoch: int, now: float) -> None:
        for _, record in self._of(peer, epoch):
            self._do(record, record.session.fenced(), now)

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        for record in tuple(self._records.values()):
            self._do(record, record.session.tick(now), now)
        self._due = min((record.session.deadline for record in self._records.values()), default=math.inf)

    def close(self, now: float) -> None:
        """The transport is closed. Whose writers can write nevertheless has no end: their pages are never said to be safe."""
        for record in tuple(self._records.values()):
            self._do(record, record.session.peer_down(LossReason.PEER_DEAD, now), now)

    def _refuse(self, handoff: HandoffId, reason: LossReason) -> None:
        self._stats.lost[reason] += 1
        self._emit(Lost(handoff, reason, safe=True))

    def _of(self, peer: str, epoch: int) -> list[tuple[int, _Record]]:
        return [(serial, r) for serial, r in self._records.items() if r.peer == peer and r.epoch == epoch]

    def _get(self, link: Link, serial: int) -> _Record | None:
        record = self._records.get(serial)
        return record if record is not None and (record.peer, record.epoch) == (link.peer, link.epoch) else None

    def _do(self, record: _Record, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Tell(message):
                    self._links.tell(record.peer, record.epoch, message)
                case Fence():
                    self._links.transport.fence(record.peer, record.epoch)
                case Emit(event):
                    self._count(record, event, now)
                    self._emit(event)
        self._due = min(self._due, record.session.deadline)

    def _count(self, record: _Record, event: PortEvent, now: float) -> None:
        """Keeps the counters, and forgets a record with its last event."""
        stats = self._stats
        pages = len(record.session.ticket.pages)
        match event:
            case Landed(_, tokens):
                stats.landed += 1
                stats.landed_tokens += len(tokens)
                stats.landed_bytes += record.bytes
                stats.landing_s += now - record.since
            case Lost(_, reason, safe):
                stats.lost[reason] += 1
                stats.wasted_bytes += record.bytes
                if not safe:
                    record.lost = now
                    stats.quarantined += 1
                    stats.quarantined_pages += pages
                    return
            case Safe():
                stats.quarantined_pages -= pages
                stats.quarantine_s += now - record.lost
        del self._records[event.handoff.serial]
