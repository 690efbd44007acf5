"""One instance's end of all its transfers: the KvPort of its engine, over a Transport.

    engine ──commands──► Endpoint ──► Links (who is up), Receivers (as D), Senders (as P) ──► Transport
           ◄──events────

`step` does all there is to do and never waits: a simulator calls it at virtual times. `start` gives it a thread of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.api import (
    FenceReason,
    Fetch,
    HandoffId,
    KvTransferError,
    Limits,
    LossReason,
    Notified,
    PeerDown,
    PeerFenced,
    PeerRefused,
    PeerUp,
    PortEvent,
    Received,
    Ticket,
    Transport,
    TransportEvent,
    WriteDone,
)
from kv_transfer.links import Link, Links
from kv_transfer.messages import Accepted, Beat, Cancel, Ended, MalformedError, Message, Note, decode
from kv_transfer.plan import misfit
from kv_transfer.receivers import Receivers
from kv_transfer.senders import Senders
from kv_transfer.stats import Stats

log = logging.getLogger("kv_transfer")


_LONGEST_PERIOD_S = 1.0  # between two polls of an engine that waits; a longer one was no time that the thread could use


@dataclass(slots=True)
class _Hung:
    """A step that was under way at the last poll, and for how long."""

    step: int
    seconds: float


class Endpoint:
    """Owns the transport. `clock`: monotonic seconds. `checksum`: what comes here as D is checked against what was sent."""

    def __init__(
        self,
        transport: Transport,
        limits: Limits | None = None,
        *,
        checksum: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self.stats = Stats()
        self._transport = transport
        self._clock = clock
        self._links = Links(transport, self.limits, self.stats)
        self._receivers = Receivers(self._links, self._emit, checksum)
        self._senders = Senders(self._links, self._emit)
        self._commands: deque[Callable[[float], None]] = deque()  # of other threads, for `step`
        self._events: deque[PortEvent] = deque()  # for `poll`
        self._waiting_since = math.inf  # when the first of these came
        self._wake_engine: Callable[[], None] = lambda: None
        self._polled = clock()  # when the engine last did, or told something
        self._busy_s = 0.0  # how long it may be silent, as it has said
        self._steps = 0  # begun; odd while one is under way
        self._hung = _Hung(0, 0.0)
        self._fetching = threading.Lock()  # the highest serial so far
        self._serial = -1
        self._thread: threading.Thread | None = None
        self._closing = False
        self._over = False  # all links are down for good; commands are carried out by whoever gives them
        self._carrying_out = threading.Lock()  # the commands, once it is over
        self._failure: Exception | None = None
        self._forgotten: set[str] = set()  # peers that are forgotten when no handoff depends on them any more

    # --- KvPort: any thread ---

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    def fetch(self, fetch: Fetch) -> None:
        self._check(fetch)
        with self._fetching:
            if fetch.handoff.serial <= self._serial:
                raise ValueError(f"{fetch.handoff}: serials count up, and {self._serial} has been used")
            self._serial = fetch.handoff.serial
            self._command(partial(self._receivers.fetch, fetch))

    def drop(self, handoff: HandoffId) -> None:
        if handoff.decode_epoch == self.epoch:
            self._command(partial(self._receivers.drop, handoff))
        else:
            self._command(partial(self._senders.stop, handoff, LossReason.DROPPED))

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        self._command(partial(self._senders.computed, handoff, layers, tokens, tuple(pages)))

    def failed(self, handoff: HandoffId) -> None:
        self._command(partial(self._senders.stop, handoff, LossReason.PREFILL_FAILED))

    def busy(self, seconds: float) -> None:
        self._polled, self._busy_s = self._clock(), seconds

    def poll(self) -> Sequence[PortEvent]:
        now = self._clock()
        self._note_hang(now)
        self._polled, self._waiting_since = now, math.inf
        events = [self._events.popleft() for _ in range(len(self._events))]
        if not events and self._failure is not None:
            raise KvTransferError(f"the KV transfer of this instance has stopped: {self._failure!r}") from self._failure
        return events

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    # --- its owner: any thread ---

    def connect(self, peer: str, address: str) -> None:
        """See `Transport.connect`. A peer whose address is none is refused, as one that cannot be a peer."""
        self._command(partial(self._connect, peer, address), of_engine=False)

    def forget(self, peer: str) -> None:
        """See `Transport.forget`. Done when no handoff with it is alive: pages in quarantine wait for its next connection."""
        self._command(lambda now: self._forgotten.add(peer), of_engine=False)

    def peers(self) -> dict[str, int]:
        """Those that are up, with their epochs."""
        return {link.peer: link.epoch for link in self._links}

    def start(self) -> None:
        """Runs `step` in a thread from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the transport and then every handoff; `poll` has their last events, and no Safe for pages that a
        peer can still write into: they are nobody's until this process ends. A thread that hangs is left as it is."""
        self._closing = True
        self._transport.wake()
        if self._thread is not None:
            self._thread.join(self.limits.hang_s)
            if self._thread.is_alive():
                log.error("the KV transfer of this instance hangs: its transport is left open")
                return
        self._end()

    # --- driving it: one thread ---

    def step(self) -> float:
        """Takes in what has come and does what is due. When the next `step` is due, unless something comes before."""
        self._steps += 1
        try:
            return self._step(self._clock())
        finally:
            self._steps += 1

    def _step(self, now: float) -> float:
        while self._commands:
            self._commands.popleft()(now)
        for event in self._transport.poll():
            self._take(event, now)
        for peer in [peer for peer in self._forgotten if not self._receivers.has(peer)]:
            self._forgotten.discard(peer)
            self._links.forget(peer)
        for link in self._links.silent(now):
            self.stats.peers_silent += 1
            self._transport.disconnect(link.peer)
            self._lose_peer(link.peer, link.epoch, LossReason.PEER_SILENT, now)
        self._receivers.tick(now)
        self._senders.tick(now)
        alive = now < self._polled + self._patience_s
        for link in self._links.beats(now):
            fetching = self._receivers.fetching(link) if alive else ()
            self._links.tell(link.peer, link.epoch, Beat(fetching, self._senders.pushing(link, alive)))
        return min(self._links.deadline, self._receivers.deadline, self._senders.deadline)

    @property
    def _patience_s(self) -> float:
        """With the engine's silence."""
        return self.limits.lease_s + self._busy_s

    @property
    def idle(self) -> bool:
        """Whether no handoff is alive here, not even in quarantine, and nothing waits for `step` or `poll`."""
        return not (len(self._receivers) or len(self._senders) or self._commands or self._events)

    def _run(self) -> None:
        try:
            while not self._closing and self._failure is None:
                due = self.step()
                self._transport.wait(max(0.0, min(due - self._clock(), self.limits.heartbeat_s)))
            if self._failure is not None:
                self._end()
        except Exception as error:
            log.exception("the KV transfer of this instance has stopped")
            self._failure = error
            self._end()
            self._wake_engine()

    def _end(self) -> None:
        """Closes the transport and ends what is alive."""
        if self._over:
            return
        now = self._clock()
        take = partial(self._take_all, now)
        ends: list[Callable[[], None]] = [self._transport.close, take, self._links.close]
        ends += [partial(self._receivers.close, now), take, partial(self._senders.close, now)]
        for end in ends:
            try:
                end()
            except Exception:  # of a transport that has failed
                log.exception("the KV transfer of this instance did not end in order")
        self._over = True
        self._carry_out()

    def _take_all(self, now: float) -> None:
        for event in self._transport.poll():
            self._take(event, now)

    def _carry_out(self) -> None:
        """What still comes when it is over is answered as if no peer was ever there."""
        with self._carrying_out:
            while self._commands:
                self._commands.popleft()(self._clock())

    def _connect(self, peer: str, address: str, now: float) -> None:
        self._forgotten.discard(peer)
        if self._over:
            return
        self._links.called.add(peer)
        try:
            self._transport.connect(peer, address)
        except ValueError as error:
            self._links.refuse(peer, str(error))

    def _note_hang(self, now: float) -> None:
        """Fails when the same step is under way for `hang_s`, as seen by a caller that does not stand still itself."""
        steps, hung = self._steps, self._hung
        if self._thread is None or steps % 2 == 0 or steps != hung.step:
            self._hung = _Hung(steps, 0.0)
        elif self._failure is None:
            hung.seconds += min(now - self._polled, _LONGEST_PERIOD_S)
            if hung.seconds >= self.limits.hang_s:
                self._failure = TimeoutError(f"a step of its thread has not ended for {hung.seconds:.1f} s")

    def _take(self, event: TransportEvent, now: float) -> None:
        match event:
            case Received(peer, epoch, frame):
                self._read(self._links.heard(peer, epoch, now), frame, now)
            case Notified(peer, epoch, note):
                self._read(self._links.heard(peer, epoch, now), note, now, written=True)
            case WriteDone(handle, ok):
                self._senders.written(handle, ok, now)
            case PeerUp():
                self._receivers.peer_up(self._links.up(event, now), now)
            case PeerDown(peer, epoch):
                self._lose_peer(peer, epoch, LossReason.PEER_DEAD, now)
            case PeerFenced(peer, epoch):
                self._receivers.fenced(peer, epoch, now)
            case PeerRefused(peer, why):
                self._links.refuse(peer, why)

    def _read(self, link: Link | None, data: bytes, now: float, written: bool = False) -> None:
        """`written`: it came with a write. Notes do, and nothing else: a peer's word alone says nothing of what has landed."""
        if link is None:
            self.stats.fenced[FenceReason.STALE_EPOCH] += 1
            return
        try:
            if written and len(data) > self.limits.max_note_bytes:
                raise MalformedError(f"a note of {len(data)} bytes; at most {self.limits.max_note_bytes} are taken")
            message = decode(data, self.limits)
            if isinstance(message, Note) is not written:
                raise MalformedError(f"a {type(message).__name__} that came the wrong way")
        except MalformedError as error:
            log.warning("%s sent what is no message: %s", link.peer, error)
            self.stats.fenced[FenceReason.MALFORMED] += 1
            return
        if not self._hear(link, message, now):
            self.stats.fenced[FenceReason.UNKNOWN_HANDOFF] += 1

    def _hear(self, link: Link, message: Message, now: float) -> bool:
        """Whether the handoff that it is about is known."""
        match message:
            case Note():
                return self._receivers.noted(link, message, now)
            case Accepted() | Ended():
                return self._receivers.answered(link, message, now)
            case Ticket():
                self._senders.asked(link, message, now, deaf=now >= self._waiting_since + self._patience_s)
            case Cancel():
                self._senders.cancelled(link, message, now)
            case Beat(fetching, pushing):
                self._senders.renewed(link, fetching, now)
                self._receivers.renewed(link, pushing, now)
            case _:
                self.stats.fenced[FenceReason.MALFORMED] += 1  # a second Hello
        return True

    def _lose_peer(self, peer: str, epoch: int, reason: LossReason, now: float) -> None:
        self._links.down(peer, epoch)
        self._receivers.peer_down(peer, epoch, reason, now)
        self._senders.peer_down(peer, epoch, reason, now)

    def _emit(self, event: PortEvent) -> None:
        self._waiting_since = min(self._waiting_since, self._clock())
        self._events.append(event)
        self._wake_engine()

    def _command(self, command: Callable[[float], None], of_engine: bool = True) -> None:
        if of_engine:
            self._polled = self._clock()
        self._commands.append(command)
        if self._over:
            self._carry_out()
        else:
            self._transport.wake()

    def _check(self, fetch: Fetch) -> None:
        """Raises ValueError when the fetch contradicts itself or this pool."""
        if fetch.handoff.decode_epoch != self.epoch:
            raise ValueError(f"{fetch.handoff} is not of this start of the instance ({self.epoch:016x})")
        wrong = misfit(self._transport.layout, len(fetch.tokens), fetch.start, fetch.pages, fetch.generations)
        if wrong is not None:
            raise ValueError(wrong)
