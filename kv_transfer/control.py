"""Control lines between instances: one TCP connection per pair of peers, over which frames go both ways, in order.

    frame    4 bytes of length, big-endian, 1 byte of kind, then so many bytes
    HELLO    the first frame each way, the caller's first (`messages.Hello`)
    REFUSED  instead of the answer to a hello: why; then the line is closed
    others   belong to whoever owns the lines

A peer whose process ends closes its lines: that is how its death is noticed, as fast as the kernel tells. One that is frozen or
cut off keeps them open; to notice that is the owner's (it sends heartbeats). The secret travels as it is: lines belong on
loopback, which is the default, or on a network that only the fleet is on.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from kv_transfer.api import KvTransferError, Limits, TransportError
from kv_transfer.messages import Hello, IncompatibleError, MalformedError, decode, encode

HELLO_S = 5.0  # from the begin of a connection to the end of both hellos
MAX_HELLO_BYTES = 64 * 2**10  # nothing is known yet of who sends it
MAX_STRANGERS = 64  # callers at once that have not said hello
RETRY_S, MAX_RETRY_S = 0.05, 1.0  # from the loss of a line to the next call; doubled for each call in vain
MAX_UNSENT_BYTES = 128 * 2**20  # a peer that does not read for so long is hung up on
_READ_BYTES = 256 * 2**10
_READS = 64  # of one line in a turn, so that others have theirs
_HEAD = 5

log = logging.getLogger("kv_transfer")


class Kind(IntEnum):
    """Of a frame."""

    HELLO = 1
    REFUSED = 2
    MESSAGE = 3
    WRITTEN = 4


class FrameTooLargeError(KvTransferError):
    """A frame that is longer than its kind may be. Nothing of it is read."""


class RefusedError(KvTransferError):
    """The other end said in its answer that we cannot be its peer."""


class _Phase(Enum):
    CALLING = "calling"  # until the connection is there
    GREETING = "greeting"  # until the peer's hello is there
    UP = "up"
    CLOSED = "closed"


@dataclass(eq=False)
class Line:
    """One connection. `peer`: the name as dialed, or from the hello; empty for a caller without one so far."""

    sock: socket.socket
    peer: str
    dialed: bool
    since: float
    phase: _Phase
    hello: Hello | None = None  # the peer's
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)

    @property
    def up(self) -> bool:
        return self.phase is _Phase.UP

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


@dataclass(slots=True)
class _Dial:
    """A peer to be called, again and again."""

    address: tuple[str, int]
    due: float = 0.0
    retry_s: float = RETRY_S
    line: Line | None = None


class Lines:
    """All lines of an instance, one to each peer. Owner: one thread, but `wake`.

    When two instances call each other at once, the call of the one whose name is first in the alphabet counts.
    """

    def __init__(self, owner: LineOwner, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> None:
        self._owner = owner
        self._limits = limits
        self._dials: dict[str, _Dial] = {}
        self._lines: dict[str, Line] = {}  # those that are up
        self._unsaid: set[Line] = set()  # without a hello so far
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._server.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self.watch(self._server, self._accept)
        self.watch(self._woken, self._clear_wake)

    @property
    def address(self) -> str:
        """Of this instance, for the others' `dial`."""
        host, port = self._server.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def dial(self, peer: str, address: str) -> None:
        """Calls `peer` until there is a line, and again whenever there is none. Raises ValueError for a bad address."""
        if peer == self._owner.name:
            raise ValueError(f"{peer} is this instance itself")
        self._dials[peer] = _Dial(_parsed(address))

    def forget(self, peer: str) -> None:
        """Does not call it any more; a line that is up stays."""
        dial = self._dials.pop(peer, None)
        if dial is not None and dial.line is not None and not dial.line.up:
            self.hang_up(dial.line)

    def get(self, peer: str) -> Line | None:
        """The line to a peer that is up."""
        return self._lines.get(peer)

    def send(self, line: Line, kind: Kind, body: bytes) -> None:
        """Never blocks. Raises TransportError when the line is closed or nothing leaves it any more."""
        if line.phase is _Phase.CLOSED or len(line.outbox) + len(body) > MAX_UNSENT_BYTES:
            raise TransportError(f"the line to {line.who} is closed or stuck; wait for the next PeerUp")
        line.outbox += len(body).to_bytes(4, "big") + bytes((kind,)) + body
        if line.phase is not _Phase.CALLING:
            self._flush(line)

    def watch(self, watched: socket.socket | int, act: Callable[[], None]) -> None:
        """Calls `act` in the next turn after this file can be read."""
        self._selector.register(watched, selectors.EVENT_READ, act)

    def unwatch(self, watched: socket.socket | int) -> None:
        self._selector.unregister(watched)

    def turn(self) -> None:
        """Takes in and sends what can be, calls who is to be called; never blocks."""
        for key, _ in self._selector.select(0):
            if self._selector.get_map().get(key.fd) is key:  # not closed by one before it
                key.data()
        now = time.monotonic()
        for line in [line for line in self._unsaid if now > line.since + HELLO_S]:
            log.info("%s did not say hello within %g s", line.who, HELLO_S)
            self.hang_up(line)
        for peer, dial in tuple(self._dials.items()):
            if dial.line is None and peer not in self._lines and now >= dial.due:
                self._call(peer, dial, now)

    def wait(self, timeout_s: float) -> bool:
        """Whether `turn` has something to do, or `wake` was called, within the time."""
        due = min(
            [line.since + HELLO_S for line in self._unsaid]
            + [dial.due for peer, dial in self._dials.items() if dial.line is None and peer not in self._lines],
            default=math.inf,
        )
        ready = self._selector.select(max(0.0, min(timeout_s, due - time.monotonic())))
        return bool(ready) or time.monotonic() > due

    def wake(self) -> None:
        """Ends a `wait`. Any thread may call it, also after `close`."""
        with contextlib.suppress(OSError):  # full: it is awake already
            self._waker.send(b"\0")

    def hang_up(self, line: Line) -> None:
        """A peer that was dialed is called again."""
        if line.phase is _Phase.CLOSED:
            return
        was_up, line.phase = line.up, _Phase.CLOSED
        self._unsaid.discard(line)
        self._selector.unregister(line.sock)
        line.sock.close()
        if self._lines.get(line.peer) is line:
            del self._lines[line.peer]
        dial = self._dials.get(line.peer)
        if dial is not None and dial.line is line:
            dial.line = None
            dial.due = time.monotonic() + dial.retry_s
            dial.retry_s = RETRY_S if was_up else min(2 * dial.retry_s, MAX_RETRY_S)
        self._owner.parted(line, was_up)

    def close(self) -> None:
        self._dials.clear()
        for line in (*self._lines.values(), *self._unsaid):
            self.hang_up(line)
        self._selector.close()
        for sock in (self._server, self._woken, self._waker):
            sock.close()

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return  # it has gone again
        if len(self._unsaid) >= MAX_STRANGERS:
            log.warning("more than %d callers at once that have not said hello", MAX_STRANGERS)
            sock.close()
            return
        self._begin(Line(sock, "", dialed=False, since=time.monotonic(), phase=_Phase.GREETING))

    def _call(self, peer: str, dial: _Dial, now: float) -> None:
        family = socket.AF_INET6 if ":" in dial.address[0] else socket.AF_INET
        dial.line = Line(socket.socket(family), peer, dialed=True, since=now, phase=_Phase.CALLING)
        self._begin(dial.line)
        with contextlib.suppress(OSError):  # shown when the socket is ready
            dial.line.sock.connect_ex(dial.address)
        self._selector.modify(dial.line.sock, selectors.EVENT_WRITE, lambda line=dial.line: self._called(line))

    def _begin(self, line: Line) -> None:
        line.sock.setblocking(False)
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsaid.add(line)
        self._selector.register(line.sock, selectors.EVENT_READ, lambda: self._ready(line))

    def _called(self, line: Line) -> None:
        error = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            log.debug("%s does not answer: error %d", line.who, error)
            self.hang_up(line)
            return
        line.phase = _Phase.GREETING
        self._selector.modify(line.sock, selectors.EVENT_READ, lambda: self._ready(line))
        self._guarded(line, lambda: self.send(line, Kind.HELLO, encode(self._owner.greet(line))))

    def _ready(self, line: Line) -> None:
        self._guarded(line, lambda: self._read(line))
        if line.outbox and line.phase is not _Phase.CLOSED:
            self._flush(line)

    def _guarded(self, line: Line, act: Callable[[], None]) -> None:
        """Whatever a peer sends ends no line but its own."""
        try:
            act()
        except KvTransferError as error:
            self._refuse(line, error)

    def _read(self, line: Line) -> None:
        closed = False
        for _ in range(_READS):
            try:
                data = line.sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            closed = not data
            line.inbox += data
            self._take_frames(line)
            if closed or line.phase is _Phase.CLOSED:
                break
        if closed:
            self.hang_up(line)

    def _take_frames(self, line: Line) -> None:
        while len(line.inbox) >= _HEAD and line.phase is not _Phase.CLOSED:
            size, kind = int.from_bytes(line.inbox[:4], "big"), line.inbox[4]
            most = self._limits.max_frame_bytes if line.up else MAX_HELLO_BYTES
            if size > most:
                raise FrameTooLargeError(f"a frame of {size} bytes (kind {kind}); at most {most} are taken here")
            if len(line.inbox) < _HEAD + size:
                return
            body = bytes(line.inbox[_HEAD : _HEAD + size])
            del line.inbox[: _HEAD + size]
            if line.up and kind not in (Kind.HELLO, Kind.REFUSED):
                self._owner.heard(line, kind, body)
            elif kind == Kind.HELLO and not line.up:
                self._greeted(line, body)
            elif kind == Kind.REFUSED and line.dialed:
                raise RefusedError(f"it refused: {body.decode(errors='replace')[:500]}")
            else:
                raise MalformedError(f"a frame of kind {kind}, which does not belong here")

    def _greeted(self, line: Line, body: bytes) -> None:
        hello = decode(body, self._limits)
        if not isinstance(hello, Hello):
            raise MalformedError(f"a {type(hello).__name__} where a Hello belongs")
        self._owner.check(hello)
        if hello.name == self._owner.name or (line.dialed and hello.name != line.peer):
            raise IncompatibleError(
                f"it is called {hello.name!r}, which is {'not who was called' if line.dialed else 'my name'}: "
                "give each instance a name of its own and call it by that"
            )
        dial = self._dials.get(hello.name)
        mine = None if dial is None or dial.line is line else dial.line
        if mine is not None and self._owner.name < hello.name and mine.since > time.monotonic() - HELLO_S:
            self.hang_up(line)  # both have called
            return
        for other in (mine, self._lines.get(hello.name)):  # the peer's end of it is closed, or it would not call
            if other is not None:
                self.hang_up(other)
        line.peer, line.hello = hello.name, hello
        answer = None if line.dialed else encode(self._owner.greet(line))
        self._owner.joined(line)
        self._unsaid.discard(line)
        line.phase = _Phase.UP
        self._lines[line.peer] = line
        if answer is not None:
            self.send(line, Kind.HELLO, answer)
        elif dial is not None:
            dial.retry_s = RETRY_S

    def _refuse(self, line: Line, error: KvTransferError) -> None:
        """Hangs up on whoever sent this. A stranger is told why, and who cannot be a peer is not called again."""
        why = f"{type(error).__name__}: {error}"
        if line.up or isinstance(error, TransportError):
            log.warning("the line to %s is closed: %s", line.who, why)
            self.hang_up(line)
            return
        who = line.who
        if not line.dialed:
            with contextlib.suppress(OSError, TransportError):
                self.send(line, Kind.REFUSED, why.encode()[:MAX_HELLO_BYTES])
        self._dials.pop(line.peer if line.dialed else "", None)
        self.hang_up(line)
        self._owner.refused(who, why)

    def _flush(self, line: Line) -> None:
        try:
            while line.outbox:
                del line.outbox[: line.sock.send(line.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            line.outbox.clear()  # the line is broken, which its reader finds
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.outbox else 0)
        if self._selector.get_key(line.sock).events != wanted:
            self._selector.modify(line.sock, wanted, lambda: self._ready(line))


def _parsed(address: str) -> tuple[str, int]:
    """Host and port. Names are not looked up: that blocks, and what an instance publishes is an IP address."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        raise ValueError(f"{address!r} is no address: give IP:PORT") from None
