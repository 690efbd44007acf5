"""What travels between two instances: JSON lists, checked field by field. Nothing is unpickled.

    both ways, first    Hello     a connection begins: version, compatibility, then the rest
    D to P              Ticket    write into these pages
                        Cancel    stop, and say when nothing is in flight
    P to D              Accepted
                        Ended     P writes no more into the pages of this ticket: refused, failed, or the answer to Cancel
    both ways           Beat      alive, and at work on these handoffs
    with a write        Note      these layers and tokens are in your pool (a notification of the transport, not a frame)

`serial` is that of the handoff; the epoch it belongs to is that of the connection's decode end.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import astuple, dataclass
from dataclasses import fields as fields_of
from hashlib import blake2b
from typing import Any, TypeAlias

from kv_transfer.api import HandoffId, KvTransferError, Limits, LossReason, Ticket
from kv_transfer.layout import KVLayout

WIRE_VERSION = 2  # 1: the first; 2: nonces and proofs instead of the secret, numbered hellos

_MAX_TEXT = 256
_U32, _U64 = 2**32, 2**64


class MalformedError(KvTransferError):
    """Bytes that are no message of this wire version, or one beyond the limits. The message names the field."""


class IncompatibleError(KvTransferError):
    """The other end cannot be a peer; the message says what differs and what to do."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks. `number`: counts this start's hellos from 1 on, so that one that comes late is known. `host`: of the machine,
    or rather of its kernel: two ends with the same one see each other's process ids."""

    compatibility: str
    name: str
    epoch: int
    number: int
    layout: KVLayout
    host: str
    pid: int
    agent: bytes  # what the transport needs to reach the sender's memory

    def check(self, other: Hello) -> None:
        """Raises IncompatibleError when `other`, as received, is not of the same software and model."""
        if self.compatibility != other.compatibility:
            raise IncompatibleError(
                f"compatibility is {self.compatibility} here and {other.compatibility} there: run the same model, KV dtype and "
                "version of this software on both ends"
            )


@dataclass(frozen=True, slots=True)
class Cancel:
    serial: int


@dataclass(frozen=True, slots=True)
class Accepted:
    serial: int
    digest: str  # of the ticket, as P understood it


@dataclass(frozen=True, slots=True)
class Ended:
    serial: int
    reason: LossReason


@dataclass(frozen=True, slots=True)
class Beat:
    fetching: tuple[int, ...]  # serials that the sender, as D, still waits for
    pushing: tuple[int, ...]  # serials that the sender, as P, is at work on


@dataclass(frozen=True, slots=True)
class Note:
    serial: int
    digest: str  # of the ticket
    layers: range
    tokens: range
    checksum: int | None  # CRC-32 of the bytes, in the order of the descriptors


Message: TypeAlias = Hello | Ticket | Cancel | Accepted | Ended | Beat | Note


def compatibility(model: str, dtype: str, layout: KVLayout, software: str) -> str:
    """What must be equal on both ends (32 hex digits). Page size, pages and the split of heads may differ: `plan.grid` copes.

    `model`: its name and revision, or a digest of its weights. `software`: version of what computes KV.
    """
    same = {"layers": layout.layers, "head_dim": layout.head_dim, "dtype_bytes": layout.dtype_bytes}
    described = json.dumps([WIRE_VERSION, model, dtype, same, "layer,kv,page,head,slot,dim", software])
    return blake2b(described.encode(), digest_size=16).hexdigest()


def encode(message: Message) -> bytes:
    return json.dumps(_ENCODERS[type(message)](message), separators=(",", ":")).encode()


def decode(frame: bytes, limits: Limits) -> Message:
    """The message in a frame or note. Raises MalformedError, and nothing else, whatever the bytes."""
    if len(frame) > limits.max_frame_bytes:
        raise MalformedError(f"{len(frame)} bytes; at most {limits.max_frame_bytes} are taken")
    try:
        fields = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str) or fields[0] not in _DECODERS:
        raise MalformedError("not a list that begins with a kind of message")
    left = _Fields(fields[0], fields[1:], limits)
    message = _DECODERS[fields[0]](left)
    left.end()
    return message


class _Fields:
    """The fields of a message, taken one after the other, each checked. Raises MalformedError."""

    def __init__(self, kind: str, fields: list[Any], limits: Limits) -> None:
        self.kind = kind
        self.limits = limits
        self._fields = fields
        self._taken = 0

    def wrong(self, why: str) -> MalformedError:
        return MalformedError(f"field {self._taken} of {self.kind}: {why}")

    def take(self, kind: type | tuple[type, ...]) -> Any:
        if self._taken == len(self._fields):
            raise self.wrong("missing after this")
        field = self._fields[self._taken]
        self._taken += 1
        if not isinstance(field, kind) or (isinstance(field, bool) and kind is not bool):
            raise self.wrong(f"a {type(field).__name__}")
        return field

    def end(self) -> None:
        if self._taken < len(self._fields):
            raise self.wrong(f"{len(self._fields) - self._taken} too many after this")

    def integer(self, below: int = _U64, least: int = 0) -> int:
        value: int = self.take(int)
        if not least <= value < below:
            raise self.wrong("out of range")
        return value

    def seconds(self) -> float:
        value = float(self.take((int, float))) if self._short() else -1.0
        if not 0 <= value < 1e9:
            raise self.wrong("not a number of seconds")
        return value

    def _short(self) -> bool:
        """Whether the next field is not an integer too large for a float."""
        field = self._fields[self._taken] if self._taken < len(self._fields) else 0
        return not isinstance(field, int) or abs(field) < _U64

    def text(self, most: int = _MAX_TEXT) -> str:
        value: str = self.take(str)
        if len(value) > most or not value.isprintable():
            raise self.wrong(f"more than {most} characters, or unprintable")
        return value

    def optional(self, take: Callable[[], int]) -> int | None:
        if self._taken < len(self._fields) and self._fields[self._taken] is None:
            self._taken += 1
            return None
        return take()

    def integers(self, most: int, below: int) -> tuple[int, ...]:
        values: list[Any] = self.take(list)
        if len(values) > most:
            raise self.wrong(f"{len(values)} numbers; at most {most} are taken")
        if not all(type(value) is int and 0 <= value < below for value in values):
            raise self.wrong("not numbers in range")
        return tuple(values)

    def range(self) -> range:
        start, stop = self.integer(_U32), self.integer(_U32)
        if start >= stop:
            raise self.wrong("an empty range")
        return range(start, stop)


def _hello(fields: _Fields) -> Hello:
    version = fields.integer()
    if version != WIRE_VERSION:
        raise MalformedError(f"wire version {version}; this end speaks {WIRE_VERSION}: run the same software on both ends")
    compatible, name, epoch, number = fields.text(), fields.text(), fields.integer(), fields.integer(least=1)
    layout = KVLayout(*(fields.integer(_U32, least=0 if name == "first_head" else 1) for name in _LAYOUT_FIELDS))
    host, pid = fields.text(), fields.integer(_U32)
    try:
        agent = b64decode(fields.take(str), validate=True)
    except (binascii.Error, ValueError):
        raise fields.wrong("not base64") from None
    return Hello(compatible, name, epoch, number, layout, host, pid, agent)


def _ticket(fields: _Fields) -> Ticket:
    most = fields.limits.max_prompt_tokens
    handoff = HandoffId(fields.integer(), fields.integer())
    ticket = Ticket(
        handoff=handoff,
        prefill_epoch=fields.integer(),
        tokens=fields.integers(most, _U32),
        start=fields.integer(most),
        pages=fields.integers(most, 2**31),
        generations=fields.integers(most, _U64),
        prefix_hash=fields.text(),
        seconds=fields.seconds(),
        checksum=fields.take(bool),
    )
    if ticket.start >= len(ticket.tokens) or not 0 < len(ticket.pages) == len(ticket.generations):
        raise MalformedError("a ticket whose tokens, start, pages and generations do not fit each other")
    return ticket


def _ended(fields: _Fields) -> Ended:
    serial, reason = fields.integer(), fields.text()
    if reason not in _REASONS:
        raise fields.wrong("no reason that is known here")
    return Ended(serial, _REASONS[reason])


def _beat(fields: _Fields) -> Beat:
    most = fields.limits.max_handoffs
    return Beat(fields.integers(most, _U64), fields.integers(most, _U64))


def _note(fields: _Fields) -> Note:
    serial, digest, layers, tokens = fields.integer(), fields.text(), fields.range(), fields.range()
    return Note(serial, digest, layers, tokens, fields.optional(lambda: fields.integer(_U32)))


_LAYOUT_FIELDS = tuple(entry.name for entry in fields_of(KVLayout))
_REASONS = {reason.value: reason for reason in LossReason}
_DECODERS: dict[str, Callable[[_Fields], Message]] = {
    "hello": _hello,
    "ticket": _ticket,
    "cancel": lambda fields: Cancel(fields.integer()),
    "accepted": lambda fields: Accepted(fields.integer(), fields.text()),
    "ended": _ended,
    "beat": _beat,
    "note": _note,
}


_ENCODERS: dict[type, Callable[[Any], list[Any]]] = {
    Hello: lambda m: [
        *("hello", WIRE_VERSION, m.compatibility, m.name, m.epoch, m.number, *astuple(m.layout), m.host, m.pid),
        b64encode(m.agent).decode(),
    ],
    Ticket: lambda m: [
        *("ticket", m.handoff.decode_epoch, m.handoff.serial, m.prefill_epoch, m.tokens, m.start, m.pages, m.generations),
        *(m.prefix_hash, m.seconds, m.checksum),
    ],
    Cancel: lambda m: ["cancel", m.serial],
    Accepted: lambda m: ["accepted", m.serial, m.digest],
    Ended: lambda m: ["ended", m.serial, m.reason.value],
    Beat: lambda m: ["beat", m.fetching, m.pushing],
    Note: lambda m: ["note", m.serial, m.digest, m.layers.start, m.layers.stop, m.tokens.start, m.tokens.stop, m.checksum],
}
