"""Control lines between instances: one TCP connection per pair of peers, over which frames go both ways, in order.

    frame    4 bytes of length, big-endian, 1 byte of kind, then so many bytes
    NONCE    the first frame each way, then HELLO (`messages.Hello`): see `greeting`, the caller's first
    REFUSED  instead of the answer to either: why; then the line is closed
    others   belong to whoever owns the lines

A peer whose process ends closes its lines: that is how its death is noticed, as fast as the kernel tells. One that is frozen or
cut off keeps them open; to notice that is the owner's (it sends heartbeats). Frames are neither secret nor signed: lines belong
on loopback, which is the default, or on a network that only the fleet is on.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.api import KvTransferError, Limits, TransportError
from kv_transfer.greeting import Greeting
from kv_transfer.line import FrameTooLargeError, Kind, Line, LineOwner, Phase, RefusedError
from kv_transfer.messages import Hello, IncompatibleError, MalformedError, decode, encode

HELLO_S = 5.0  # from the begin of a connection to the end of both hellos
MAX_HELLO_BYTES = 64 * 2**10  # nothing is known yet of who sends it
MAX_STRANGERS = 64  # callers at once that have not said hello
RETRY_S, MAX_RETRY_S = 0.05, 1.0  # from the loss of a line to the next call; doubled for each call in vain
DEAF_S = 1.0  # no call is taken for so long when there is no file left for one
MAX_KNOWN = 1024  # names whose newest hello is remembered
MAX_UNSENT_BYTES = 128 * 2**20  # a peer that does not read for so long is hung up on
_READ_BYTES = 256 * 2**10
_READS = 64  # of one line in a turn, so that others have theirs
_TICK_S = 1e-3  # the selector counts in these, and rounds up
_HEAD = 5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("kv_transfer")


@dataclass(slots=True)
class _Dial:
    """A peer to be called, again and again."""

    address: tuple[str, int]
    due: float = 0.0
    retry_s: float = RETRY_S
    line: Line | None = None

    def put_off(self) -> None:
        self.due = time.monotonic() + self.retry_s
        self.retry_s = min(2 * self.retry_s, MAX_RETRY_S)


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
        self._newest: dict[str, tuple[int, int]] = {}  # name -> epoch and number of its last hello that was taken
        self._deaf_until = math.inf  # inf: calls are taken
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
        parsed, before = _parsed(address), self._dials.get(peer)
        if before is not None and before.address == parsed:
            before.due = 0.0
            return
        self.forget(peer)  # and with it a call that is under way
        self._dials[peer] = _Dial(parsed)

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
        if line.phase is Phase.CLOSED or len(line.outbox) + len(body) > MAX_UNSENT_BYTES:
            raise TransportError(f"the line to {line.who} is closed or stuck; wait for the next PeerUp")
        line.outbox += len(body).to_bytes(4, "big") + bytes((kind,)) + body
        if line.phase is not Phase.CALLING:
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
        if now >= self._deaf_until:
            self._deaf_until = math.inf
            self.watch(self._server, self._accept)
        for line in [line for line in self._unsaid if now > line.since + HELLO_S]:
            log.info("%s did not say hello within %g s", line.who, HELLO_S)
            self.hang_up(line)
        for peer, dial in tuple(self._dials.items()):
            if dial.line is None and peer not in self._lines and now >= dial.due:
                self._call(peer, dial, now)

    def wait(self, timeout_s: float) -> bool:
        """Whether `turn` has something to do, or `wake` was called, within the time; below a millisecond, after it."""
        due = min(
            [self._deaf_until, *(line.since + HELLO_S for line in self._unsaid)]
            + [dial.due for peer, dial in self._dials.items() if dial.line is None and peer not in self._lines]
        )
        timeout_s = max(0.0, min(timeout_s, due - time.monotonic()))
        if 0.0 < timeout_s < _TICK_S:
            time.sleep(timeout_s)
            timeout_s = 0.0
        return bool(self._selector.select(timeout_s)) or time.monotonic() > due

    def wake(self) -> None:
        """Ends a `wait`. Any thread may call it, also after `close`."""
        with contextlib.suppress(OSError):  # full: it is awake already
            self._waker.send(b"\0")

    def hang_up(self, line: Line) -> None:
        """A peer that was dialed is called again."""
        if line.phase is Phase.CLOSED:
            return
        was_up, line.phase = line.up, Phase.CLOSED
        self._unsaid.discard(line)
        self._selector.unregister(line.sock)
        line.sock.close()
        if self._lines.get(line.peer) is line:
            del self._lines[line.peer]
        dial = self._dials.get(line.peer)
        if dial is not None and dial.line is line:
            dial.line = None
            dial.put_off()
            if was_up:
                dial.retry_s = RETRY_S
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
        except OSError as error:  # else it has gone again
            if error.errno in _EXHAUSTED:
                log.warning("no call can be taken: %s", error)
                self.unwatch(self._server)
                self._deaf_until = time.monotonic() + DEAF_S
            return
        if sum(not line.dialed for line in self._unsaid) >= MAX_STRANGERS:
            log.warning("more than %d callers at once that have not said hello", MAX_STRANGERS)
            sock.close()
            return
        greeting = Greeting(self._owner.secret, called=True)
        self._begin(Line(sock, "", dialed=False, since=time.monotonic(), phase=Phase.GREETING, greeting=greeting))

    def _call(self, peer: str, dial: _Dial, now: float) -> None:
        family = socket.AF_INET6 if ":" in dial.address[0] else socket.AF_INET
        try:
            sock = socket.socket(family)
        except OSError as error:
            log.warning("%s cannot be called: %s", peer, error)
            dial.put_off()
            return
        greeting = Greeting(self._owner.secret, called=False)
        line = dial.line = Line(sock, peer, dialed=True, since=now, phase=Phase.CALLING, greeting=greeting)
        self._begin(line)
        found = line.sock.connect_ex(dial.address)
        if found in (0, errno.EINPROGRESS):
            self._selector.modify(line.sock, selectors.EVENT_WRITE, lambda: self._called(line))
        else:
            log.debug("%s cannot be reached: error %d", peer, found)
            self.hang_up(line)

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
        line.phase = Phase.GREETING
        self._selector.modify(line.sock, selectors.EVENT_READ, lambda: self._ready(line))
        self._guarded(line, lambda: self.send(line, Kind.NONCE, line.greeting.call()))

    def _ready(self, line: Line) -> None:
        self._guarded(line, lambda: self._read(line))
        if line.outbox and line.phase is not Phase.CLOSED:
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
            if closed or line.phase is Phase.CLOSED:
                break
        if closed:
            self.hang_up(line)

    def _take_frames(self, line: Line) -> None:
        while len(line.inbox) >= _HEAD and line.phase is not Phase.CLOSED:
            size, kind = int.from_bytes(line.inbox[:4], "big"), line.inbox[4]
            most = self._limits.max_frame_bytes if line.up else MAX_HELLO_BYTES
            if size > most:
                raise FrameTooLargeError(f"a frame of {size} bytes (kind {kind}); at most {most} are taken here")
            if len(line.inbox) < _HEAD + size:
                return
            body = bytes(line.inbox[_HEAD : _HEAD + size])
            del line.inbox[: _HEAD + size]
            if line.up and kind not in (Kind.NONCE, Kind.HELLO, Kind.REFUSED):
                self._owner.heard(line, kind, body)
            elif kind == Kind.NONCE and not line.up:
                self._agree(line, body)
            elif kind == Kind.HELLO and not line.up:
                self._greeted(line, line.greeting.unseal(body))
            elif kind == Kind.REFUSED and line.dialed:
                raise RefusedError(f"it refused: {body.decode(errors='replace')[:500]!r}")
            else:
                raise MalformedError(f"a frame of kind {kind}, which does not belong here")

    def _agree(self, line: Line, body: bytes) -> None:
        if line.dialed:
            line.greeting.take_answer(body)
            self.send(line, Kind.HELLO, line.greeting.seal(encode(self._owner.greet(line))))
        else:
            self.send(line, Kind.NONCE, line.greeting.answer(body))

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
        epoch, number = self._newest.get(hello.name, (hello.epoch, 0))
        if hello.epoch == epoch and hello.number <= number:
            raise TransportError(f"hello {hello.number} of {hello.name} comes after {number}: its line is closed there already")
        dial = self._dials.get(hello.name)
        mine = None if dial is None or dial.line is line else dial.line
        if mine is not None and self._owner.name < hello.name and mine.since > time.monotonic() - HELLO_S:
            self.hang_up(line)  # both have called
            return
        for other in (mine, self._lines.get(hello.name)):  # the peer's end of it is closed, or it would not call
            if other is not None:
                self.hang_up(other)
        line.peer, line.hello = hello.name, hello
        answer = b"" if line.dialed else line.greeting.seal(encode(self._owner.greet(line)))
        self._owner.joined(line)
        self._note_newest(hello)
        self._unsaid.discard(line)
        line.phase = Phase.UP
        self._lines[line.peer] = line
        if answer:
            self.send(line, Kind.HELLO, answer)
        elif dial is not None:
            dial.retry_s = RETRY_S

    def _note_newest(self, hello: Hello) -> None:
        self._newest.pop(hello.name, None)
        self._newest[hello.name] = (hello.epoch, hello.number)
        if len(self._newest) > MAX_KNOWN:
            del self._newest[next(iter(self._newest))]

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
        parsed = str(ipaddress.ip_address(host)), int(port)
        if not 0 < parsed[1] < 2**16:
            raise ValueError(port)
        return parsed
    except ValueError:
        raise ValueError(f"{address!r} is no address: give IP:PORT") from None
