"""What the parts of a KV transfer tell each other: ids, the ticket, events, limits, and the two Protocols.

    engine of D --fetch-->  KvPort  --Ticket-->  KvPort --Wanted--> engine of P
    engine of D <-Landed--  KvPort  <==writes==  KvPort <-computed- engine of P

D is the decode instance, P the prefill instance. D reserves the pages, P writes into them. `KvPort` is the seam to an engine,
`Transport` the seam to whatever moves the bytes. Knows no NIXL, no sockets, no engine.

A write cannot be called back. So what was named to a writer stays D's, in quarantine, until that writer has said that it writes
no more, or cannot write any more: `Lost` says that the request must go on without, `Safe` that its pages may be freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_transfer.layout import KVLayout

Indices: TypeAlias = NDArray[np.int32]  # 1-d, into a prepared descriptor list (`plan.descriptors`)


class KvTransferError(Exception):
    """Base of what this package raises; the message says what to do."""


class TransportError(KvTransferError):
    """A transport cannot do what it was asked now: the peer is not up, or its process is not the one that was meant."""


class LossReason(Enum):
    """Why a handoff ended without its KV. The value is the metric label."""

    PEER_UNKNOWN = "peer_unknown"  # not connected, or never heard of
    PEER_BUSY = "peer_busy"  # refused: it has as many exports as it takes
    PEER_INCOMPATIBLE = "peer_incompatible"  # refused: another layout, model or version
    TOO_LONG = "too_long"  # more tokens than a transfer takes: prefill it where it is decoded
    PEER_DEAD = "peer_dead"  # its connection was closed or its process is gone
    PEER_SILENT = "peer_silent"  # no heartbeat: frozen, or cut off
    PEER_RESTARTED = "peer_restarted"  # the epoch is another one now
    NOT_ACCEPTED = "not_accepted"  # no answer to the ticket in time
    LEASE_EXPIRED = "lease_expired"  # the peer lives, but does not say that it works on this handoff
    PREFILL_FAILED = "prefill_failed"  # P could not compute it
    WRITE_FAILED = "write_failed"  # the transport said so
    CHECKSUM = "checksum"  # what landed is not what was sent
    STALE_PAGES = "stale_pages"  # notes name other pages or generations than the ticket
    DEADLINE = "deadline"
    DROPPED = "dropped"  # the engine wanted it no more


class FenceReason(Enum):
    """Why a message or notification was refused. The value is the metric label."""

    STALE_EPOCH = "stale_epoch"  # meant for, or sent by, another start of an instance
    UNKNOWN_HANDOFF = "unknown_handoff"  # never was, or has ended
    REPLAYED = "replayed"  # of a kind or range that was taken before
    WRONG_RANGE = "wrong_range"  # layers or tokens that the ticket does not have, or not aligned
    WRONG_TICKET = "wrong_ticket"  # its digest (pages, generations, prefix) is not the ticket's
    PREFIX_MISMATCH = "prefix_mismatch"  # the tokens are not those that the prefix hash is of
    EXPIRED = "expired"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, order=True)
class HandoffId:
    """One prompt's KV on its way. D's engine counts `serial` up from 0; no two fetches of one epoch share it."""

    decode_epoch: int  # random 64 bit per start of D: `KvPort.epoch`
    serial: int

    def __str__(self) -> str:
        return f"{self.decode_epoch:016x}.{self.serial}"


@dataclass(frozen=True, slots=True)
class Fetch:
    """D's engine asks for KV of tokens[start:] from `peer`. Positions are those of the prompt."""

    handoff: HandoffId
    peer: str
    tokens: tuple[int, ...]  # of the prompt but its last: what P computes
    start: int  # tokens that D has already, a multiple of D's page size
    pages: tuple[int, ...]  # D's pages, in order, of tokens[start:]; nobody else reads or writes them
    generations: tuple[int, ...]  # of each of these pages: how often it has been allocated
    deadline: float  # on D's clock: Landed or Lost by then


@dataclass(frozen=True, slots=True)
class Ticket:
    """What D sends to P: the right to write into these pages until the lease or `seconds` end."""

    handoff: HandoffId
    prefill_epoch: int  # of the start of P that it is for
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    prefix_hash: str  # `prefix_hash(tokens)`
    seconds: float  # from its sending to its deadline: the ends' clocks differ
    checksum: bool  # every note must have the CRC-32 of its bytes

    @property
    def digest(self) -> str:
        """Names everything that a write depends on; every note of a push carries it (16 hex digits)."""
        parts = (self.handoff, self.prefill_epoch, self.start, self.pages, self.generations, self.prefix_hash)
        return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def prefix_hash(tokens: Sequence[int]) -> str:
    """Of token ids in [0, 2**32): 32 hex digits. Cryptographic, as a prompt is chosen by its client."""
    return blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and sizes that a transfer keeps to, whatever the peer does."""

    heartbeat_s: float = 0.25  # between two heartbeats of an endpoint to each of its peers
    silence_s: float = 2.0  # without any word: the peer counts as frozen or cut off
    accept_s: float = 1.0  # from the ticket to its answer
    lease_s: float = 5.0  # of a handoff, since the other end last said that it works on it; of an engine, see `KvPort.busy`
    drain_s: float = 1.0  # without a sign that a cancelled handoff's writes come to their end; then by force
    hang_s: float = 10.0  # an endpoint's thread that does not end a step for so long has failed: steps never wait
    max_handoffs: int = 1024  # alive with one peer, in one direction
    max_prompt_tokens: int = 2**20
    max_frame_bytes: int = 32 * 2**20
    max_note_bytes: int = 1024


# --- the seam to an engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Landed:
    """To D: KV of tokens [start, stop) is in the pages of the fetch, complete and verified. The peer writes there no more."""

    handoff: HandoffId
    tokens: range


@dataclass(frozen=True, slots=True)
class Lost:
    """To D: go on without. The pages may be freed if `safe`, else only after `Safe`."""

    handoff: HandoffId
    reason: LossReason
    safe: bool


@dataclass(frozen=True, slots=True)
class Safe:
    """To D: nobody writes into the pages of this lost handoff any more; free them."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class Wanted:
    """To P: compute KV of all tokens, call `computed` for what is at or after `start`; sample nothing."""

    handoff: HandoffId
    peer: str
    tokens: tuple[int, ...]
    start: int
    deadline: float  # on P's clock


@dataclass(frozen=True, slots=True)
class Unwanted:
    """To P: stop computing it. Its pages are still read until `Sent`."""

    handoff: HandoffId
    reason: LossReason


@dataclass(frozen=True, slots=True)
class Sent:
    """To P: its pages are no longer read; release them. `complete`: D has it all."""

    handoff: HandoffId
    complete: bool


PortEvent: TypeAlias = Landed | Lost | Safe | Wanted | Unwanted | Sent


class KvPort(Protocol):
    """What an engine calls. Thread-safe; never blocks; an unknown or ended handoff is ignored, as events may have crossed.

    Every `fetch` is answered by one Landed or one Lost, every Lost that is not safe by one Safe, every Wanted by one Sent; also
    when the port is closed or fails, but for a Safe that nobody can promise then: those pages are lost until the process ends.
    An engine polls at least every `Limits.lease_s / 2`, but for what it has said by `busy`: one that does not counts as stuck,
    and its peers' leases end.
    """

    @property
    def epoch(self) -> int:
        """Of this start of the instance; for `HandoffId`."""

    def fetch(self, fetch: Fetch) -> None:
        """D: starts a handoff. Raises ValueError for one that contradicts itself or whose handoff id was used before."""

    def drop(self, handoff: HandoffId) -> None:
        """D: the request has ended; the answer is still to come, and the pages stay until then. P: it will not be computed."""

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        """P: KV of `tokens` in `layers` is in `pages`, which hold the page of the first of `tokens` to that of the last.

        Of each layer in the order of the tokens and without gaps from `start` (or before it) on; ranges need not be aligned.
        What was told may be told again.
        """

    def failed(self, handoff: HandoffId) -> None:
        """P: it cannot be computed."""

    def busy(self, seconds: float) -> None:
        """From now on the engine may be silent for so long, as its device works; it counts as stuck `Limits.lease_s` later.
        Holds for every silence until it is said anew: 0 when the device rests."""

    def poll(self) -> Sequence[PortEvent]:
        """What happened since the last call, in order. Raises KvTransferError when the port has failed and nothing is left."""

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, from any thread, when `poll` has something new: an idle engine sleeps."""


# --- the seam to what moves the bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Connected, hello exchanged, compatible, and the pools have a `plan.grid`: tickets and writes may go."""

    peer: str
    epoch: int
    layout: KVLayout  # of the peer's pool


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection to this start of the peer has ended; what was posted to it ends as failed. It may come up again."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """No write of this start of the peer can land here any more: its process is dead, or it has lost the right to."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """It cannot be a peer: another wire version, layout, model or secret. Counted; not tried again before `connect`."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Received:
    """A frame over the control line (`messages.decode`), in the order sent."""

    peer: str
    epoch: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Notified:
    """The note of a write of the peer, all bytes of which are in this pool."""

    peer: str
    epoch: int
    note: bytes


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A posted write is over: its source is no longer read. `ok`: all of it is at the peer."""

    handle: int
    ok: bool


TransportEvent: TypeAlias = PeerUp | PeerDown | PeerFenced | PeerRefused | Received | Notified | WriteDone


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Copies this pool's descriptor local[i] to the peer's descriptor remote[i], for all i; then gives it the note.

    Both index `plan.descriptors` of their own layout on the pair's `plan.grid`, which the transport prepares when a peer is up.
    """

    local: Indices
    remote: Indices
    note: bytes  # at most Limits.max_note_bytes


class Transport(Protocol):
    """Moves bytes and frames between this instance and its peers. One thread calls all of it, but `wake`.

    Nothing blocks, but `wait` and `close`. Every posted handle ends with one WriteDone, whatever happens to the peer, at the
    latest after `disconnect`. Notes may overtake each other and the control line.
    Peers are named as by `connect`; one that connected to us, by the name in its hello. Of a peer there is one connection at a
    time: after its PeerDown, and so before the next PeerUp, nothing that came over it is delivered. PeerFenced may come before
    or after PeerDown, and without `fence` when the peer's process is seen to be dead.
    """

    @property
    def epoch(self) -> int:
        """Random 64 bit, of this start."""

    @property
    def layout(self) -> KVLayout:
        """Of this instance's pool."""

    def connect(self, peer: str, address: str) -> None:
        """Starts to connect, and to connect again after a loss. Answered by PeerUp or PeerRefused. Raises ValueError for an
        address that is none."""

    def disconnect(self, peer: str) -> None:
        """Ends the connection, if one is up; PeerDown follows. A peer that was connected to is tried again."""

    def forget(self, peer: str) -> None:
        """As `disconnect`, and it is not tried again until `connect`."""

    def fence(self, peer: str, epoch: int) -> None:
        """Makes late writes of this start of the peer impossible; PeerFenced follows, if only when its process has died."""

    def send(self, peer: str, epoch: int, frame: bytes) -> None:
        """Over the control line, in order. Raises TransportError when this start of the peer is not up."""

    def post(self, peer: str, epoch: int, write: Write) -> int:
        """Starts a write; returns its handle. Raises TransportError when this start of the peer is not up."""

    def cancel(self, handle: int) -> None:
        """Ends a write early if that can be done. WriteDone follows in any case; one that is over is left alone."""

    def checksum(self, peer: str, indices: Indices) -> int:
        """CRC-32 over the bytes of these descriptors of this pool, one after the other, on the grid of the pair.

        Raises TransportError when the peer is not up.
        """

    def poll(self) -> Sequence[TransportEvent]:
        """What happened since the last call, in order."""

    def wait(self, timeout_s: float) -> None:
        """Returns when `poll` may have something, after `wake`, or after `timeout_s`."""

    def wake(self) -> None:
        """Ends a `wait` early. Any thread may call it."""

    def close(self) -> None:
        """Ends all connections and threads, and gives back all memory registrations. `poll` and `fence` work still: the last
        events say what has ended, and PeerFenced of whom can write here no more."""
