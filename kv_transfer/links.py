"""Which peers an endpoint has: who is up, in which start, when last heard, and how to tell them something."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.api import Limits, PeerUp, Transport, TransportError
from kv_transfer.layout import KVLayout
from kv_transfer.messages import Message, encode
from kv_transfer.plan import Grid, grid
from kv_transfer.stats import Stats

log = logging.getLogger("kv_transfer")


@dataclass(slots=True)
class Link:
    """One connection to one start of a peer."""

    peer: str
    epoch: int
    layout: KVLayout
    grid: Grid
    heard: float  # when last
    beat: float  # when the next heartbeat is due


class Links:
    """The links that are up, by the peer's name."""

    def __init__(self, transport: Transport, limits: Limits, stats: Stats) -> None:
        self.transport = transport
        self.limits = limits
        self.stats = stats
        self._up: dict[str, Link] = {}
        self.called: set[str] = set()  # peers that we connected to
        self.refused: set[str] = set()  # of them, those that cannot be peers

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._up.values()))

    def up(self, event: PeerUp, now: float) -> Link:
        """The new link, in place of one to an earlier start of the peer."""
        cut = grid(self.transport.layout, event.layout)
        self.refused.discard(event.peer)
        link = self._up[event.peer] = Link(event.peer, event.epoch, event.layout, cut, heard=now, beat=now)
        return link

    def refuse(self, peer: str, why: str) -> None:
        """Counted and logged; a fetch from one that was called is then told so."""
        log.warning("%s cannot be a peer: %s", peer, why)
        self.stats.peers_refused += 1
        if peer in self.called:
            self.refused.add(peer)

    def forget(self, peer: str) -> None:
        self.called.discard(peer)
        self.refused.discard(peer)
        self.transport.forget(peer)

    def close(self) -> None:
        """None is up any more."""
        self._up.clear()

    def down(self, peer: str, epoch: int) -> None:
        """This start of the peer is not up any more; another one stays."""
        if self.get(peer, epoch) is not None:
            del self._up[peer]

    def get(self, peer: str, epoch: int | None = None) -> Link | None:
        """The link to this start of the peer (or to any), if it is up."""
        link = self._up.get(peer)
        return link if link is not None and epoch in (None, link.epoch) else None

    def heard(self, peer: str, epoch: int, now: float) -> Link | None:
        """The link over which this start of the peer was just heard, if it is up."""
        link = self.get(peer, epoch)
        if link is not None:
            link.heard = now
        return link

    def tell(self, peer: str, epoch: int, message: Message) -> bool:
        """Whether the transport has taken it. If not, PeerDown has come or is coming."""
        if self.get(peer, epoch) is None:
            return False
        try:
            self.transport.send(peer, epoch, encode(message))
        except TransportError as error:
            log.info("%s was not told %s: %s", peer, type(message).__name__, error)
            return False
        return True

    def silent(self, now: float) -> list[Link]:
        """Those not heard for too long."""
        return [link for link in self if now >= link.heard + self.limits.silence_s]

    def beats(self, now: float) -> list[Link]:
        """Those to which a heartbeat is due; the next one is set."""
        due = [link for link in self if now >= link.beat]
        for link in due:
            link.beat = now + self.limits.heartbeat_s
        return due

    @property
    def deadline(self) -> float:
        """When a heartbeat or the end of patience is due next."""
        return min((min(link.beat, link.heard + self.limits.silence_s) for link in self), default=math.inf)
