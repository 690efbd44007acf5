"""A gateway's line to an instance: one TCP connection, JSON frames both ways. Knows nothing of ray or the engine.

Why not a Serve handle: a handle's stream costs more than a millisecond of CPU per step and gateway in either of Serve's
transports (measured with `bench.overhead`), a submit costs several milliseconds of latency, and no public handle can name the
replica it wants. Here a message is one write, frames keep their order (an abort never overtakes its submit), and a side that
dies closes the line. Serve still starts, lists, checks and replaces the instances; `describe` hands out address and password.

frame       4 bytes of length, big-endian, then JSON
to the instance     ["hello", version, token, gateway_id]; then ["submit", number, submission], ["abort", request ids],
                    ["timeline", number, first record, seconds back], ["role", number, role],
                    ["peers", {instance id: address of its KV endpoint}], ["ping"]
to the gateway      ["step", load, events], ["reply", number, refusal or null, load], ["leaving"], ["refused", why],
                    ["timeline", number, page], ["figures", counters] once a second, ["standing", standing] as often and at
                    once when the role changes
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.serve import wire
from pdmux_ray.serve.known import HEARTBEAT_S, LOAD_PERIOD_S

SILENCE_LIMIT_S = 30.0  # a side that has heard nothing for so long hangs up
MAX_FRAME_BYTES = 256 * 2**20
MAX_UNSENT_BYTES = 64 * 2**20  # a gateway that does not read for so long is hung up on
HELLO_TIMEOUT_S = 5.0
MAX_HELLO_BYTES = 4096  # of each side's first frame, from whom the other knows nothing yet
MAX_STRANGERS = 64  # connected at once without having said hello

log = logging.getLogger("ray.serve")

_encode = json.JSONEncoder(separators=(",", ":")).encode


def pack(frame: Sequence[Any]) -> bytes:
    """Raises RequestError when it is larger than the other side would take: that hangs up on everybody's requests."""
    body = _encode(frame).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise RequestError(f"The request takes {len(body)} bytes between servers; at most {MAX_FRAME_BYTES} go. Send less.")
    return len(body).to_bytes(4, "big") + body


async def read(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> list[Any]:
    """The next frame, of `limit` bytes at most. Raises ConnectionError when the line is closed or speaks something else."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > limit:
            raise ConnectionError(f"a frame of {length} bytes")
        frame = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the other side hung up") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConnectionError(str(error)) from error
    if not isinstance(frame, list) or not frame:
        raise ConnectionError("a frame that is no list")
    return frame


class Engine(Protocol):
    """What the instance's end needs. All of it returns at once."""

    def submit(self, sink: str, submission: wire.Submission) -> wire.Refusal | None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def load(self) -> wire.PackedLoad: ...

    def figures(self) -> wire.Figures: ...

    def timeline(self, first: int, seconds: float) -> wire.TimelinePage: ...

    def standing(self) -> wire.PackedStanding: ...

    def assume(self, role: str) -> wire.Refusal | None:
        """Another role, from now on."""

    def meet(self, peers: Mapping[str, str]) -> None:
        """Instances to get KV from: id -> address."""


class _Caller:
    """One connected gateway, at the instance."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.requests: set[str] = set()  # not finished yet
        self.heard_s = time.monotonic()

    def send(self, frame: Sequence[Any]) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(pack(frame))

    def hang_up_if_dead(self) -> None:
        unsent = self.writer.transport.get_write_buffer_size()
        if time.monotonic() - self.heard_s > SILENCE_LIMIT_S or unsent > MAX_UNSENT_BYTES:
            self.writer.transport.abort()


class Switchboard:
    """The instance's end of all lines. Owner: the replica's event loop; only `deliver` may be called from another thread.

    However a line ends, its unfinished requests are aborted.
    """

    def __init__(self, engine: Engine) -> None:
        self.token = secrets.token_urlsafe(32)
        self.port = 0
        self._engine = engine
        self._callers: dict[str, _Caller] = {}  # by sink
        self._strangers = 0  # connections without a hello so far
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._regular: list[asyncio.Task[None]] = []

    async def open(self, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._regular = [self._loop.create_task(self._beat()), self._loop.create_task(self._tell_load())]

    def deliver(self, sink: str, events: list[wire.Event]) -> None:
        """From the engine's thread, once per step and sink."""
        self._loop.call_soon_threadsafe(self._deliver, sink, events)

    async def drain(self, timeout_s: float) -> None:
        """Tells the gateways to send no more, and waits until what they have sent is finished."""
        end_s = time.monotonic() + timeout_s
        for caller in self._callers.values():
            caller.send(["leaving"])
        while any(caller.requests for caller in self._callers.values()) and time.monotonic() < end_s:
            await asyncio.sleep(0.1)

    def close(self) -> None:
        for task in self._regular:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for caller in self._callers.values():
            caller.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sink = ""
        try:
            sink = f"{await self._greeted(reader, writer)}/{next(self._numbers)}"
            caller = self._callers[sink] = _Caller(writer)
            caller.send(["step", self._engine.load(), []])
            caller.send(["standing", self._engine.standing()])
            while True:
                frame = await read(reader)
                caller.heard_s = time.monotonic()
                self._handle(sink, caller, frame)
        except Exception as error:  # whatever a peer sends, it ends no line but its own
            log.info("The line %s ended: %r", sink or "of a stranger", error)
        finally:
            writer.transport.abort()
            if (gone := self._callers.pop(sink, None)) is not None:
                self._engine.abort(list(gone.requests))

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The gateway's id. Raises ConnectionError for a caller without the password or of another version."""
        if self._strangers >= MAX_STRANGERS:
            raise ConnectionError("too many callers at once that have not said hello")
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                kind, *rest = await read(reader, MAX_HELLO_BYTES)
        finally:
            self._strangers -= 1
        version, token, gateway_id = rest if len(rest) == 3 else (1, *rest)
        if kind != "hello" or not hmac.compare_digest(str(token).encode(), self.token.encode()):
            raise ConnectionError("a caller without the password")
        if version != wire.VERSION:
            why = f"this instance speaks version {wire.VERSION} of the wire, the gateway version {version}"
            writer.write(pack(["refused", why]))
            raise ConnectionError(why)
        return str(gateway_id)

    def _handle(self, sink: str, caller: _Caller, frame: list[Any]) -> None:
        if frame[0] == "submit":
            _, number, submission = frame
            refusal = self._engine.submit(sink, submission)
            if refusal is None:
                caller.requests.update(wire.request_ids(submission))
            caller.send(["reply", number, refusal, self._engine.load()])
        elif frame[0] == "abort":
            self._engine.abort(frame[1])
        elif frame[0] == "timeline":
            _, number, first, seconds = frame
            caller.send(["timeline", number, self._engine.timeline(first, seconds)])
        elif frame[0] == "role":
            _, number, role = frame
            refusal = self._engine.assume(role)
            for each in self._callers.values():
                each.send(["standing", self._engine.standing()])
            caller.send(["reply", number, refusal, self._engine.load()])
        elif frame[0] == "peers":
            if not isinstance(frame[1], dict) or not all(isinstance(address, str) for address in frame[1].values()):
                raise ConnectionError("peers that are no map of addresses")
            self._engine.meet(frame[1])

    def _deliver(self, sink: str, events: list[wire.Event]) -> None:
        caller = self._callers.get(sink)
        if caller is not None:
            caller.requests.difference_update(event[0] for event in events if wire.is_last(event))
            caller.send(["step", self._engine.load(), events])

    async def _tell_load(self) -> None:
        """It may work for other gateways alone, or, in role prefill, for other instances."""
        told: wire.PackedLoad | None = None
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            load = self._engine.load()
            if load != told:
                told = load
                for caller in self._callers.values():
                    caller.send(["step", load, []])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for caller in self._callers.values():
                caller.send(["step", self._engine.load(), []])
                caller.send(["figures", self._engine.figures()])
                caller.send(["standing", self._engine.standing()])
                caller.hang_up_if_dead()


class Listener(Protocol):
    """What the gateway's end hands on."""

    def on_step(self, load: wire.PackedLoad, events: Sequence[wire.Event]) -> None: ...

    def on_figures(self, figures: wire.Figures) -> None: ...

    def on_standing(self, standing: wire.PackedStanding) -> None: ...

    def on_leaving(self) -> None: ...


class Line:
    """The gateway's end of one line. Owner: the gateway's event loop.

    The listener's methods are called from `listen`.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._writer: asyncio.StreamWriter | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._heard_s = 0.0

    async def listen(self, host: str, port: int, token: str, gateway_id: str) -> None:
        """Connects and reads until the line ends, which it says by raising ConnectionError.

        Any other error is a peer that speaks nonsense.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                reader, self._writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from error
        self._heard_s = time.monotonic()
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            self._send(["hello", wire.VERSION, token, gateway_id])
            limit = MAX_HELLO_BYTES  # of the first frame: nothing shows yet that this is the instance
            while True:
                frame, limit = await read(reader, limit), MAX_FRAME_BYTES
                self._heard_s = time.monotonic()
                self._handle(frame)
        finally:
            keeping_alive.cancel()
            self._writer.transport.abort()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(InstanceUnavailableError("The instance went away. Send the request again."))

    async def submit(self, submission: wire.Submission) -> wire.Refusal | None:
        """None when all are accepted. Raises InstanceUnavailableError when the line is or goes down, RequestError for a
        submission that is too large for it."""
        refusal: wire.Refusal | None = await self._ask("submit", submission)
        return refusal

    async def timeline(self, first: int, seconds: float) -> wire.TimelinePage:
        """The instance's oldest records from number `first` on that are no older than `seconds`, as many as one page has.

        Raises InstanceUnavailableError when the line is or goes down.
        """
        page: wire.TimelinePage = await self._ask("timeline", first, seconds)
        return page

    async def assume(self, role: str) -> wire.Refusal | None:
        """Gives the instance another role; when it returns, `on_standing` has told it. Raises InstanceUnavailableError when the
        line is or goes down."""
        refusal: wire.Refusal | None = await self._ask("role", role)
        return refusal

    def name_peers(self, peers: Mapping[str, str]) -> None:
        """Instances to get KV from: id -> address. Never fails: an instance whose line is down is told when it is up."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._send(["peers", peers])

    async def _ask(self, kind: str, *what: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._send([kind, number, *what])
            return await reply
        finally:
            del self._replies[number]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Never fails: an instance whose line is down has aborted them by itself."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._send(["abort", request_ids])

    def hang_up(self) -> None:
        """Ends the line, and `listen` with it."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _keep_alive(self) -> None:
        """Pings on its own clock, whatever else the gateway waits for; hangs up on an instance that is silent for too long."""
        while self._writer is not None and not self._writer.transport.is_closing():
            if time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
                self.hang_up()
                return
            self._send(["ping"])
            await asyncio.sleep(HEARTBEAT_S)

    def _send(self, frame: Sequence[Any]) -> None:
        if self._writer is None or self._writer.transport.is_closing():
            raise InstanceUnavailableError("The line to the instance is down. Send the request again.")
        self._writer.write(pack(frame))

    def _handle(self, frame: list[Any]) -> None:
        if frame[0] == "step":
            self._listener.on_step(frame[1], frame[2])
        elif frame[0] == "reply":
            _, number, refusal, load = frame
            self._listener.on_step(load, [])
            self._answered(number, refusal)
        elif frame[0] == "timeline":
            self._answered(frame[1], frame[2])
        elif frame[0] == "figures":
            self._listener.on_figures(frame[1])
        elif frame[0] == "standing":
            self._listener.on_standing(frame[1])
        elif frame[0] == "leaving":
            self._listener.on_leaving()
        elif frame[0] == "refused":
            raise ConnectionError(frame[1])

    def _answered(self, number: int, answer: Any) -> None:
        """Whoever asked may have gone meanwhile."""
        reply = self._replies.get(number)
        if reply is not None and not reply.done():
            reply.set_result(answer)
