"""KV from and for other instances: what the engine asks of its `KvPort`, and what the port's events do to requests and pages.

D, which decodes:   waiting, with a peer --begin: pages reserved and exposed--> TRANSFER --Landed--> DECODE
                                                                                         --Lost----> QUEUED (next peer, or here)
P, which prefills:  Wanted --> an export: a request that is computed to its last token, samples nothing and tells nobody

Pages of a fetch are exposed, and those of an export leased, as holders of their own (`engine.pages`). So a request may end at
any moment: its pages are free when the transfer has ended, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from kv_transfer.api import (
    Fetch,
    HandoffId,
    KvPort,
    KvTransferError,
    Landed,
    Limits,
    Lost,
    PortEvent,
    Safe,
    Sent,
    Unwanted,
    Wanted,
)
from pdmux_ray.engine.counters import LANDED, ExportEnd
from pdmux_ray.engine.pages import PagePool
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import PrefillSlice
from pdmux_ray.errors import IntegrityError, PdmuxError
from pdmux_ray.policy.decisions import FetchReason
from pdmux_ray.policy.fetching import plan_fetches
from pdmux_ray.types import FinishReason

if TYPE_CHECKING:
    from pdmux_ray.config import TransferConfig
    from pdmux_ray.engine.scheduler import Scheduler

PARTS = 8  # of the layers, that the peer is told of one after the other

logger = logging.getLogger(__name__)


def export_id(handoff: HandoffId) -> str:
    """The request id of an export."""
    return f"export {handoff}"


def transfer_limits(config: TransferConfig) -> Limits:
    """Of an instance's endpoint."""
    return Limits(
        heartbeat_s=config.heartbeat_s,
        silence_s=config.silence_s,
        accept_s=config.accept_s,
        lease_s=config.lease_s,
        drain_s=config.drain_s,
    )


class NoPort(KvPort):
    """Of an instance without peers: nothing is fetched, nothing is wanted."""

    @property
    def epoch(self) -> int:
        return 0

    def fetch(self, fetch: Fetch) -> None:
        raise IntegrityError(f"{fetch.handoff} cannot be fetched: this engine has no port")

    def drop(self, handoff: HandoffId) -> None: ...

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None: ...

    def failed(self, handoff: HandoffId) -> None: ...

    def poll(self) -> Sequence[PortEvent]:
        return ()

    def busy(self, seconds: float) -> None: ...

    def wake_with(self, wake: Callable[[], None]) -> None: ...


class Handoffs:
    """Of one engine. Everything runs in the step loop's thread. `take_export` enqueues an export, or raises PdmuxError."""

    def __init__(self, port: KvPort, layers: int, take_export: Callable[[Wanted], None]) -> None:
        self.broken: str | None = None  # what the port failed with; the engine goes on without it
        self._port = port
        self._layers = layers
        self._take_export = take_export
        self._heard: deque[PortEvent] = deque()  # not acted on yet
        self._serials = count()
        self._due_s: dict[str, float] = {}  # waiting requests that have a peer -> by when to have fetched
        self._fetching: dict[HandoffId, Request] = {}  # in phase TRANSFER
        self._sharing: dict[str, Request] = {}  # in phase TRANSFER, too: they wait for an equal prompt of those
        self._exposed: dict[HandoffId, tuple[int, ...]] = {}
        self._leased: dict[HandoffId, tuple[int, ...]] = {}
        self._ends: dict[HandoffId, ExportEnd] = {}  # of exports that will not be complete

    @property
    def alive(self) -> bool:
        """Whether pages come back by an event of the port."""
        return bool(self._exposed or self._leased)

    def page_lists(self) -> tuple[Iterable[Sequence[int]], Iterable[Sequence[int]]]:
        """Leased and exposed ones."""
        return self._leased.values(), self._exposed.values()

    # Between two steps, and amid a long one: the port is listened to; then, between two steps, its events are acted on.

    def listen(self) -> None:
        try:
            events = self._port.poll()
        except KvTransferError as error:
            logger.critical("the KV port has failed: this engine goes on without other instances", exc_info=True)
            self.broken, self._port = str(error), NoPort()
            return
        for event in events:
            if isinstance(event, Wanted):
                self._take(event)
            else:
                self._heard.append(event)

    def busy(self, seconds: float) -> None:
        """The device is given work that may take so long."""
        self._port.busy(seconds)

    def unwanted(self) -> set[str]:
        """Exports that have ended by an event that was not acted on yet."""
        return {export_id(event.handoff) for event in self._heard if isinstance(event, Unwanted | Sent)}

    def act(self, scheduler: Scheduler, now: float) -> None:
        while self._heard:
            event = self._heard.popleft()
            if isinstance(event, Landed):
                self._land(event, scheduler, now)
            elif isinstance(event, Lost):
                scheduler.counters.fetches[event.reason.value] += 1
                if event.safe:
                    self._end_exposure(event.handoff, scheduler.pool)
                self._go_on_without(event.handoff, scheduler, now)
            elif isinstance(event, Safe):
                self._end_exposure(event.handoff, scheduler.pool)
            elif isinstance(event, Unwanted):
                self._ends[event.handoff] = ExportEnd.UNWANTED
                scheduler.abort(export_id(event.handoff), now)
            elif isinstance(event, Sent):
                self._sent(event, scheduler, now)
        if self.broken:
            self._due_s.clear()
            for handoff in list(self._fetching):
                self._go_on_without(handoff, scheduler, now)

    # D.

    def enqueued(self, request: Request) -> None:
        """It waits, and may have a peer that is still to be tried."""
        if request.peers and not self.broken:
            self._due_s[request.request_id] = request.fetch_deadline_s

    def begin(self, scheduler: Scheduler, now: float) -> None:
        """Reserves pages for waiting requests that have a peer, as far as there is room, and asks the peer."""
        self._end_sharing(scheduler, now)
        if not self._due_s:
            return
        choices = plan_fetches(scheduler, self._due_s, scheduler.max_batch, now)
        for choice in choices:
            self._decided(scheduler.requests[choice.request_id], choice.reason, scheduler)
            if choice.reason is FetchReason.SHARED:
                self._sharing[choice.request_id] = scheduler.requests[choice.request_id]
                scheduler.share_transfer(scheduler.requests[choice.request_id], now)
        requests = [scheduler.requests[choice.request_id] for choice in choices if choice.reason is FetchReason.ROOM]
        for request in requests:  # hits are held before anyone takes a page
            scheduler.begin_transfer(request, now)
        for request in requests:
            self._fetch(request, scheduler.pool)

    def _end_sharing(self, scheduler: Scheduler, now: float) -> None:
        """Whose prompt is fetched for nobody any more waits again, in its place by arrival."""
        if not self._sharing:
            return
        fetched = {request.prefix_key for request in self._fetching.values()}
        for request in [request for request in self._sharing.values() if request.prefix_key not in fetched]:
            del self._sharing[request.request_id]
            scheduler.requeue(request, now)

    def started(self, request: Request, scheduler: Scheduler) -> None:
        """A plan starts it here."""
        if request.request_id in self._due_s:
            self._decided(request, FetchReason.OVERTAKEN, scheduler)

    def give_up(self, request: Request) -> None:
        """The KV of a request in TRANSFER is not wanted any more; the port still answers."""
        if self._sharing.pop(request.request_id, None) is not None:
            return
        assert request.handoff is not None
        del self._fetching[request.handoff]
        self._port.drop(request.handoff)

    def _decided(self, request: Request, reason: FetchReason, scheduler: Scheduler) -> None:
        del self._due_s[request.request_id]
        scheduler.counters.fetch_choices[reason] += 1
        if reason not in (FetchReason.ROOM, FetchReason.SHARED):
            request.peers.clear()

    def _fetch(self, request: Request, pool: PagePool) -> None:
        size, start, stop = pool.page_size, request.computed_tokens, request.known_tokens - 1
        request.pages.extend(pool.take(-(-request.known_tokens // size) - len(request.pages)))
        pages = tuple(request.pages[start // size : -(-stop // size)])
        pool.expose(pages)
        handoff = request.handoff = HandoffId(self._port.epoch, next(self._serials))
        self._fetching[handoff] = request
        self._exposed[handoff] = pages
        tokens, generations = tuple(request.tokens[:stop]), pool.generations(pages)
        self._port.fetch(Fetch(handoff, request.peers.pop(0), tokens, start, pages, generations, request.fetch_deadline_s))

    def _land(self, event: Landed, scheduler: Scheduler, now: float) -> None:
        scheduler.counters.fetches[LANDED] += 1
        scheduler.counters.kv_received_tokens += len(event.tokens)
        self._end_exposure(event.handoff, scheduler.pool)
        request = self._fetching.pop(event.handoff, None)
        if request is None:  # it has ended meanwhile
            return
        if event.tokens != range(request.computed_tokens, request.known_tokens - 1):
            raise IntegrityError(f"{event} is not what was missing of request {request.request_id}")
        scheduler.land(request, len(event.tokens), now)

    def _go_on_without(self, handoff: HandoffId, scheduler: Scheduler, now: float) -> None:
        request = self._fetching.pop(handoff, None)
        if request is not None:
            scheduler.requeue(request, now)

    def _end_exposure(self, handoff: HandoffId, pool: PagePool) -> None:
        pages = self._exposed.pop(handoff, None)
        if pages is None:
            raise IntegrityError(f"the port says of handoff {handoff} that its pages are safe, but none are exposed")
        pool.end_exposure(pages)

    # P.

    def begin_export(self, request: Request, pool: PagePool) -> None:
        """It has its pages; what the prefix cache had of it can be sent."""
        assert request.handoff is not None
        pages = self._leased[request.handoff] = tuple(request.pages)
        pool.lease(pages)
        if request.computed_tokens:
            self.computed(request, range(self._layers), 0, request.computed_tokens, pool.page_size)

    def computed(self, request: Request, layers: range | None, start: int, tokens: int, page_size: int) -> None:
        """KV of an export's tokens [start, start + tokens) in these layers (None: all) is in its pages."""
        assert request.handoff is not None
        pages = request.pages[start // page_size : -(-(start + tokens) // page_size)]
        self._port.computed(request.handoff, layers or range(self._layers), range(start, start + tokens), pages)

    def amid_pass(self, pieces: Iterable[PrefillSlice], done: int, page_size: int) -> None:
        """The pass under way is through `done` layers. Of a prompt that it ends they are told part by part, so that little is
        left to send after it; of one that goes on in another pass there is time."""
        part = -(-self._layers // PARTS)
        if not done or done % part:
            return
        for piece in pieces:
            request = piece.sequence
            assert isinstance(request, Request)
            if request.exported and piece.start + piece.tokens == request.known_tokens:
                self.computed(request, range(done - part, done), piece.start, piece.tokens, page_size)

    def _take(self, event: Wanted) -> None:
        try:
            self._take_export(event)
        except PdmuxError as error:
            logger.info("no export for %s, handoff %s: %s", event.peer, event.handoff, error)
            self._fail(event.handoff, ExportEnd.REFUSED)

    def _fail(self, handoff: HandoffId, end: ExportEnd) -> None:
        self._ends[handoff] = end
        self._port.failed(handoff)

    def _sent(self, event: Sent, scheduler: Scheduler, now: float) -> None:
        end = self._ends.pop(event.handoff, ExportEnd.UNWANTED)
        scheduler.counters.exports[ExportEnd.SENT if event.complete else end] += 1
        scheduler.pool.end_lease(self._leased.pop(event.handoff, ()))
        scheduler.abort(export_id(event.handoff), now)

    # Both.

    def ended(self, request: Request, finish: FinishReason) -> None:
        """It leaves the engine, whatever it was doing."""
        self._due_s.pop(request.request_id, None)
        self._sharing.pop(request.request_id, None)
        if request.handoff is None:
            return
        if request.handoff in self._fetching:
            self.give_up(request)
        elif request.exported and finish is FinishReason.ERROR:
            self._fail(request.handoff, ExportEnd.FAILED)
