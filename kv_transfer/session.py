"""One handoff at each of its ends: events in, actions out. No I/O, no clock: `now` (seconds, of the own end) is an argument.

    Receiver (D)   ASKED ──Accepted──► RECEIVING ──last note──► CLOSED (Landed)
                     │                     │
                     ├──Ended, fenced──────┴──► CLOSED (Lost, safe)
                     └──anything else──► QUARANTINED (Lost) ──Ended, fenced──► CLOSED (Safe)

    Sender (P)     PUSHING ──all pushed, all writes over──► CLOSED (Sent, complete)
                     └──anything else──► DRAINING ──all writes over──► CLOSED (Sent, not complete; Ended to D)

Every state has a deadline: call `tick` then. The states that wait for others to be harmless (QUARANTINED, DRAINING) ask again
at theirs and use force, a fence or a disconnect. They end because a transport promises that those do. Writes that go on ending
and a peer that says that it drains put the force off: it costs the other handoffs of the pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from kv_transfer.api import (
    FenceReason,
    HandoffId,
    Landed,
    Limits,
    LossReason,
    Lost,
    PortEvent,
    Safe,
    Sent,
    Ticket,
    Unwanted,
    Wanted,
)
from kv_transfer.messages import Accepted, Cancel, Ended, Message, Note


@dataclass(frozen=True, slots=True)
class Tell:
    """To the peer, if it is up."""

    message: Message


@dataclass(frozen=True, slots=True)
class Emit:
    """To the own engine."""

    event: PortEvent


@dataclass(frozen=True, slots=True)
class Fence:
    """Make late writes of the peer impossible."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the connection to the peer: writes to it do not end otherwise."""


@dataclass(frozen=True, slots=True)
class Push:
    """Write these; report the end of it by `Sender.written(number)`. `pages[0]` begins with token `origin`."""

    number: int
    layers: range
    tokens: range
    pages: tuple[int, ...]
    origin: int


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """End these pushes early if that can be done."""

    numbers: tuple[int, ...]


Action: TypeAlias = Tell | Emit | Fence | Disconnect | Push | CancelWrites


class ReceiverState(Enum):
    ASKED = "asked"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    CLOSED = "closed"


class Receiver:
    """D's end. `slots`: tokens that a descriptor of the pair holds at most (`plan.Grid.group_slots`)."""

    def __init__(self, ticket: Ticket, layers: int, slots: int, deadline: float, limits: Limits, now: float) -> None:
        self.ticket = ticket
        self.handoff: HandoffId = ticket.handoff
        self.state = ReceiverState.ASKED
        self._digest = ticket.digest
        self._limits = limits
        self._slots = slots
        self._end = deadline  # of the handoff
        self._patience = now + limits.accept_s  # with the peer, in the present state
        units = math.ceil(len(ticket.tokens) / slots) - ticket.start // slots
        self._landed = np.zeros((layers, units), dtype=bool)

    @property
    def deadline(self) -> float:
        """When `tick` is due."""
        if self.state is ReceiverState.CLOSED:
            return math.inf
        return self._patience if self.state is ReceiverState.QUARANTINED else min(self._patience, self._end)

    @property
    def active(self) -> bool:
        """Whether the KV is still waited for."""
        return self.state in (ReceiverState.ASKED, ReceiverState.RECEIVING)

    def accepted(self, digest: str, now: float) -> list[Action]:
        """The peer has taken on a ticket with this digest."""
        if not self.active:
            return []
        if digest != self._digest:
            return self.lose(LossReason.STALE_PAGES, now)
        self.state = ReceiverState.RECEIVING
        self._patience = now + self._limits.lease_s
        return []

    def renewed(self, now: float) -> list[Action]:
        """The peer says that it is at work on this handoff; in quarantine: that it waits for the last writes to end."""
        if self.state is ReceiverState.RECEIVING:
            self._patience = now + self._limits.lease_s
        elif self.state is ReceiverState.QUARANTINED:
            self._patience = now + self._limits.drain_s
        return []

    def fence(self, note: Note) -> FenceReason | None:
        """Why this note is refused, if it is."""
        if not self.active:
            return FenceReason.EXPIRED
        if note.digest != self._digest:
            return FenceReason.WRONG_TICKET
        units = self._units(note)
        if units is None:
            return FenceReason.WRONG_RANGE
        return FenceReason.REPLAYED if self._landed[units].any() else None

    def noted(self, note: Note, intact: bool, now: float) -> list[Action]:
        """All bytes of the note are there; `intact`: with the right checksum, where one is asked for."""
        reason = self.fence(note)
        if reason is FenceReason.WRONG_TICKET or reason is FenceReason.WRONG_RANGE:
            return self.lose(LossReason.STALE_PAGES, now)
        if reason is not None:
            return []
        if not intact:
            return self.lose(LossReason.CHECKSUM, now)
        if now >= self._end:
            return self.lose(LossReason.DEADLINE, now)
        self._landed[self._units(note)] = True
        if not self._landed.all():
            return self.renewed(now)
        self.state = ReceiverState.CLOSED
        return [Emit(Landed(self.handoff, range(self.ticket.start, len(self.ticket.tokens))))]

    def ended(self, reason: LossReason) -> list[Action]:
        """The peer writes no more into these pages."""
        return self._harmless(reason)

    def fenced(self) -> list[Action]:
        """The peer cannot write any more."""
        return self._harmless(LossReason.PEER_DEAD)

    def peer_down(self, reason: LossReason, now: float) -> list[Action]:
        """The connection has ended, which says nothing of writes that are under way."""
        if self.active:
            return [*self.lose(reason, now), Fence()]
        return [Fence()] if self.state is ReceiverState.QUARANTINED else []

    def peer_up(self) -> list[Action]:
        """The same start of the peer is back; it may have heard of no Cancel."""
        return [Tell(Cancel(self.handoff.serial))] if self.state is ReceiverState.QUARANTINED else []

    def lose(self, reason: LossReason, now: float) -> list[Action]:
        """Give it up, for instance because the engine drops it."""
        if not self.active:
            return []
        self.state = ReceiverState.QUARANTINED
        self._patience = now + self._limits.drain_s
        return [Tell(Cancel(self.handoff.serial)), Emit(Lost(self.handoff, reason, safe=False))]

    def tick(self, now: float) -> list[Action]:
        """What the present state ends with; nothing before `deadline`."""
        if now < self.deadline:
            return []
        if self.state is ReceiverState.QUARANTINED:
            self._patience = now + self._limits.drain_s
            return [Tell(Cancel(self.handoff.serial)), Fence()]
        if now >= self._end:
            return self.lose(LossReason.DEADLINE, now)
        asked = self.state is ReceiverState.ASKED
        return self.lose(LossReason.NOT_ACCEPTED if asked else LossReason.LEASE_EXPIRED, now)

    def _harmless(self, reason: LossReason) -> list[Action]:
        before, self.state = self.state, ReceiverState.CLOSED
        if before is ReceiverState.CLOSED:
            return []
        if before is ReceiverState.QUARANTINED:
            return [Emit(Safe(self.handoff))]
        return [Emit(Lost(self.handoff, reason, safe=True))]

    def _units(self, note: Note) -> tuple[slice, slice] | None:
        """The part of `_landed` that a note is about; None when it is not of this ticket, or cuts a descriptor."""
        start, stop = note.tokens.start, note.tokens.stop
        whole = start % self._slots == 0 and (stop % self._slots == 0 or stop == len(self.ticket.tokens))
        inside = self.ticket.start <= start < stop <= len(self.ticket.tokens) and 0 <= note.layers.start < note.layers.stop
        if not whole or not inside or note.layers.stop > len(self._landed):
            return None
        first = self.ticket.start // self._slots
        return slice(note.layers.start, note.layers.stop), slice(
            start // self._slots - first, math.ceil(stop / self._slots) - first
        )


class SenderState(Enum):
    PUSHING = "pushing"
    DRAINING = "draining"
    CLOSED = "closed"


class Sender:
    """P's end. `page_size`: of P's pool; `slots`: as for `Receiver`. Begin with `start`."""

    def __init__(self, ticket: Ticket, layers: int, page_size: int, slots: int, limits: Limits, now: float) -> None:
        self.ticket = ticket
        self.handoff: HandoffId = ticket.handoff
        self.digest = ticket.digest
        self.state = SenderState.PUSHING
        self._limits = limits
        self._page_size = page_size
        self._slots = slots
        self._end = now + ticket.seconds
        self._patience = now + limits.lease_s
        self._pages: dict[int, int] = {}  # number of the page in the prompt -> page of the pool
        self._computed = [ticket.start] * layers  # tokens, of each layer
        self._pushed = [ticket.start] * layers
        self._in_flight: set[int] = set()
        self._pushes = 0
        self.reason = LossReason.DROPPED  # of the end, once it is one

    @property
    def deadline(self) -> float:
        """When `tick` is due."""
        if self.state is SenderState.CLOSED:
            return math.inf
        return self._patience if self.state is SenderState.DRAINING else min(self._patience, self._end)

    def start(self, peer: str) -> list[Action]:
        """Takes the ticket on. `peer`: whose it is."""
        ticket = self.ticket
        wanted = Wanted(self.handoff, peer, ticket.tokens, ticket.start, self._end)
        return [Tell(Accepted(self.handoff.serial, self.digest)), Emit(wanted)]

    def renewed(self, now: float) -> list[Action]:
        """The peer says that it still waits for this handoff."""
        if self.state is SenderState.PUSHING:
            self._patience = now + self._limits.lease_s
        return []

    def computed(self, layers: range, tokens: range, pages: Sequence[int], now: float) -> list[Action]:
        """See `KvPort.computed`. A call that breaks its rules ends the handoff as PREFILL_FAILED."""
        if self.state is not SenderState.PUSHING:
            return []
        late = self.tick(now)
        if late:
            return late
        if not self._continues(layers, tokens, pages):
            return self.stop(LossReason.PREFILL_FAILED, now)
        self._pages.update(enumerate(pages, tokens.start // self._page_size))
        last = len(self.ticket.tokens)
        for layer in layers:
            self._computed[layer] = max(self._computed[layer], min(tokens.stop, last))
        return list(self._pushes_of(layers))

    def written(self, number: int, ok: bool, now: float) -> list[Action]:
        """The write of this push is over."""
        self._in_flight.discard(number)
        if not ok and self.state is SenderState.PUSHING:
            return self.stop(LossReason.WRITE_FAILED, now)
        if self.state is SenderState.DRAINING:
            self._patience = now + self._limits.drain_s  # the others are on their way, too
        return self._finish()

    def peer_down(self, reason: LossReason, now: float) -> list[Action]:
        """The connection has ended: the writes under way end as failed, and no other can be posted."""
        return self.stop(reason, now)

    def stop(self, reason: LossReason, now: float, told: bool = False) -> list[Action]:
        """Write no more. `told`: the engine ended it itself."""
        if self.state is not SenderState.PUSHING:
            return []
        self.state = SenderState.DRAINING
        self.reason = reason
        self._patience = now + self._limits.drain_s
        actions: list[Action] = [] if told else [Emit(Unwanted(self.handoff, reason))]
        if self._in_flight:
            actions.append(CancelWrites(tuple(sorted(self._in_flight))))
        return actions + self._finish()

    def tick(self, now: float) -> list[Action]:
        """As of a `Receiver`."""
        if now < self.deadline:
            return []
        if self.state is SenderState.DRAINING:
            self._patience = now + self._limits.drain_s
            return [Disconnect()]
        return self.stop(LossReason.DEADLINE if now >= self._end else LossReason.LEASE_EXPIRED, now)

    def _continues(self, layers: range, tokens: range, pages: Sequence[int]) -> bool:
        inside = 0 <= layers.start < layers.stop <= len(self._computed) and 0 <= tokens.start < tokens.stop
        held = math.ceil(tokens.stop / self._page_size) - tokens.start // self._page_size
        return inside and len(pages) == held and all(tokens.start <= self._computed[layer] for layer in layers)

    def _pushes_of(self, layers: range) -> list[Push]:
        """What can go now of these layers, in descriptors that are complete; layers that stand alike go together."""
        pushes: list[Push] = []
        first = layers.start
        for layer in layers:
            following = layer + 1
            alike = following < layers.stop and self._standing(following) == self._standing(layer)
            if not alike:
                pushed, ready = self._standing(layer)
                if pushed < ready:
                    pushes.append(self._push(range(first, following), range(pushed, ready)))
                first = following
        return pushes

    def _standing(self, layer: int) -> tuple[int, int]:
        """(tokens pushed, tokens that may be pushed) of a layer."""
        computed = self._computed[layer]
        whole = computed if computed == len(self.ticket.tokens) else computed // self._slots * self._slots
        return self._pushed[layer], whole

    def _push(self, layers: range, tokens: range) -> Push:
        self._pushed[layers.start : layers.stop] = [tokens.stop] * len(layers)
        self._pushes += 1
        self._in_flight.add(self._pushes)
        first, last = tokens.start // self._page_size, (tokens.stop - 1) // self._page_size
        pages = tuple(self._pages[number] for number in range(first, last + 1))
        return Push(self._pushes, layers, tokens, pages, first * self._page_size)

    def _finish(self) -> list[Action]:
        """Closes once no write is in flight, unless some are still to come."""
        complete = self.state is SenderState.PUSHING and min(self._pushed) == len(self.ticket.tokens)
        if self._in_flight or not (complete or self.state is SenderState.DRAINING):
            return []
        self.state = SenderState.CLOSED
        sent = Emit(Sent(self.handoff, complete))
        return [sent] if complete else [sent, Tell(Ended(self.handoff.serial, self.reason))]
