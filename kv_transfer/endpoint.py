"""One instance's end of all its transfers: the KvPort of its engine, over a Transport.

    engine ──commands──► Endpoint ──► Links (who is up), Receivers (as D), Senders (as P) ──► Transport
           ◄──events────

`step` does all there is to do and never waits: a simulator calls it at virtual times. `start` gives it a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from kv_transfer.receivers import Receivers
from kv_transfer.senders import Senders
from kv_transfer.stats import Stats

log = logging.getLogger("kv_transfer")


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
        self._wake_engine: Callable[[], None] = lambda: None
        self._polled = clock()  # when the engine last did
        self._fetching = threading.Lock()  # the highest serial so far
        self._serial = -1
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: Exception | None = None

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

    def used(self, handoff: HandoffId, tokens: int) -> None:
        self._command(partial(self._count_used, tokens))

    def poll(self) -> Sequence[PortEvent]:
        if self._failure is not None:
            raise KvTransferError(f"the KV transfer of this instance has stopped: {self._failure!r}") from self._failure
        self._polled = self._clock()
        return [self._events.popleft() for _ in range(len(self._events))]

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    # --- its owner: any thread ---

    def connect(self, peer: str, address: str) -> None:
        """See `Transport.connect`."""

        def act(now: float) -> None:
            self._links.called.add(peer)
            self._transport.connect(peer, address)

        self._command(act)

    def forget(self, peer: str) -> None:
        """See `Transport.forget`."""
        self._command(lambda now: self._transport.forget(peer))

    def peers(self) -> dict[str, int]:
        """Those that are up, with their epochs."""
        return {link.peer: link.epoch for link in self._links}

    def start(self) -> None:
        """Runs `step` in a thread from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the transport and then every handoff; `poll` has their last events."""
        self._closing = True
        self._transport.wake()
        if self._thread is not None:
            self._thread.join()
        self._transport.close()
        now = self._clock()
        self._receivers.close(now)
        self._senders.close(now)

    # --- driving it: one thread ---

    def step(self) -> float:
        """Takes in what has come and does what is due. When the next `step` is due, unless something comes before."""
        now = self._clock()
        while self._commands:
            self._commands.popleft()(now)
        for event in self._transport.poll():
            self._take(event, now)
        for link in self._links.silent(now):
            self.stats.peers_silent += 1
            self._transport.disconnect(link.peer)
            self._lose_peer(link.peer, link.epoch, LossReason.PEER_SILENT, now)
        self._receivers.tick(now)
        self._senders.tick(now)
        alive = now < self._polled + self.limits.lease_s
        for link in self._links.beats(now):
            fetching = self._receivers.fetching(link) if alive else ()
            self._links.tell(link.peer, link.epoch, Beat(fetching, self._senders.pushing(link, alive)))
        return min(self._links.deadline, self._receivers.deadline, self._senders.deadline)

    @property
    def idle(self) -> bool:
        """Whether no handoff is alive here, not even in quarantine, and nothing waits for `step` or `poll`."""
        return not (len(self._receivers) or len(self._senders) or self._commands or self._events)

    def _run(self) -> None:
        try:
            while not self._closing:
                due = self.step()
                self._transport.wait(max(0.0, min(due - self._clock(), self.limits.heartbeat_s)))
        except Exception as error:
            log.exception("the KV transfer of this instance has stopped")
            self._failure = error
            self._wake_engine()

    def _take(self, event: TransportEvent, now: float) -> None:
        match event:
            case Received(peer, epoch, frame):
                self._read(self._links.heard(peer, epoch, now), frame, now)
            case Notified(peer, epoch, note):
                self._read(self._links.heard(peer, epoch, now), note, now)
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

    def _read(self, link: Link | None, data: bytes, now: float) -> None:
        if link is None:
            self.stats.fenced[FenceReason.STALE_EPOCH] += 1
            return
        try:
            message = decode(data, self.limits)
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
                self._senders.asked(link, message, now)
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
        self._events.append(event)
        self._wake_engine()

    def _command(self, command: Callable[[float], None]) -> None:
        self._polled = self._clock()
        self._commands.append(command)
        self._transport.wake()

    def _count_used(self, tokens: int, now: float) -> None:
        self.stats.used_tokens += tokens

    def _check(self, fetch: Fetch) -> None:
        """Raises ValueError when the fetch contradicts itself, this pool or the limits."""
        layout = self._transport.layout
        needed = -(-(len(fetch.tokens) - fetch.start) // layout.page_size)
        if fetch.handoff.decode_epoch != self.epoch:
            raise ValueError(f"{fetch.handoff} is not of this start of the instance ({self.epoch:016x})")
        if not 0 <= fetch.start < len(fetch.tokens) <= self.limits.max_prompt_tokens or fetch.start % layout.page_size:
            raise ValueError(
                f"{fetch.start} of {len(fetch.tokens)} tokens are no whole pages with something to fetch after them"
            )
        if not needed == len(fetch.pages) == len(fetch.generations) == len(set(fetch.pages)):
            raise ValueError(f"{len(fetch.pages)} pages are not the {needed} different ones that the tokens need")
        if not all(0 <= page < layout.pages for page in fetch.pages):
            raise ValueError(f"a page of {fetch.pages} is not one of {layout.pages}")
