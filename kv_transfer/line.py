"""One control line as `control.Lines` keeps it, its kinds of frames, and what `Lines` needs of its owner."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from kv_transfer.api import KvTransferError
from kv_transfer.greeting import Greeting
from kv_transfer.messages import Hello


class Kind(IntEnum):
    """Of a frame."""

    HELLO = 1
    REFUSED = 2
    MESSAGE = 3
    WRITTEN = 4  # see `tally`
    NONCE = 5
    WIRED = 6


class FrameTooLargeError(KvTransferError):
    """A frame that is longer than its kind may be. Nothing of it is read."""


class RefusedError(KvTransferError):
    """The other end said in its answer that we cannot be its peer."""


class Phase(Enum):
    CALLING = "calling"  # until the connection is there
    GREETING = "greeting"  # until the peer's hello is there, see `greeting`
    UP = "up"
    CLOSED = "closed"


@dataclass(eq=False)
class Line:
    """One connection. `peer`: the name as dialed, or from the hello; empty for a caller without one so far."""

    sock: socket.socket
    peer: str
    dialed: bool
    since: float
    phase: Phase
    greeting: Greeting
    hello: Hello | None = None  # the peer's
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)

    @property
    def up(self) -> bool:
        return self.phase is Phase.UP

    @property
    def who(self) -> str:
        """For people: a name that was not checked is not one."""
        if self.peer:
            return self.peer
        with contextlib.suppress(OSError):
            return f"a caller from {self.sock.getpeername()[0]}"
        return "a caller that has gone"


class LineOwner(Protocol):
    """What the lines need of whoever owns them. All is called from `Lines.turn`, `hang_up` and `close`."""

    @property
    def name(self) -> str: ...

    @property
    def secret(self) -> str: ...

    def greet(self, line: Line) -> Hello:
        """What to say on this line. May set up what belongs to it, until `parted`."""

    def check(self, hello: Hello) -> None:
        """Raises KvTransferError when whoever says this cannot be a peer."""

    def joined(self, line: Line) -> None:
        """Its hello has come and is right. Raises KvTransferError to refuse it after all."""

    def parted(self, line: Line, was_up: bool) -> None:
        """The line is closed. For one that was up, `joined` had been called."""

    def heard(self, line: Line, kind: int, body: bytes) -> None:
        """A frame on a line that is up. Raises KvTransferError to hang up."""

    def refused(self, who: str, why: str) -> None:
        """A caller, or a peer that was called and will not be called again."""
