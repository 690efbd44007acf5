from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from pdmux_ray.errors import InstanceUnavailableError, QueueFullError
from pdmux_ray.serve import wire
from pdmux_ray.serve.channel import Line, Switchboard, pack


class EngineSeen:
    """Takes what comes in; refuses when told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []  # (sink, request id)
        self.aborted: list[str] = []
        self.refusal: wire.Refusal | None = None

    def submit(self, sink: str, requests: Sequence[dict[str, Any]]) -> wire.Refusal | None:
        if self.refusal is None:
            self.submitted += [(sink, request["request_id"]) for request in requests]
        return self.refusal

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def load(self) -> wire.PackedLoad:
        return (len(self.submitted), 0, 10, 10, 0, 0.0)


class Caller:
    """A gateway's end, and what it has heard."""

    def __init__(self) -> None:
        self.events: list[wire.Event] = []
        self.loads: list[Any] = []
        self.left = False
        self.line = Line(self._step, self._leave)

    def _step(self, load: list[Any], events: list[wire.Event]) -> None:
        self.loads.append(load)
        self.events += events

    def _leave(self) -> None:
        self.left = True


@asynccontextmanager
async def connected(token: str | None = None) -> AsyncIterator[tuple[EngineSeen, Switchboard, Caller, asyncio.Task[None]]]:
    engine = EngineSeen()
    board = Switchboard(engine)
    await board.open("127.0.0.1")
    caller = Caller()
    listening = asyncio.create_task(caller.line.listen("127.0.0.1", board.port, token or board.token, "g"))
    try:
        with suppress(TimeoutError):
            await until(lambda: bool(caller.loads) or listening.done())
        yield engine, board, caller, listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        board.close()
        await asyncio.sleep(0.01)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


REQUEST = {"request_id": "r", "prompt": [1], "params": {}}


async def test_a_request_is_accepted_and_its_tokens_come_back() -> None:
    async with connected() as (engine, board, caller, _):
        assert await caller.line.submit([REQUEST]) is None
        sink, request_id = engine.submitted[0]
        assert request_id == "r"
        await asyncio.to_thread(board.deliver, sink, [("r", 5)])
        await until(lambda: caller.events)
        assert caller.events == [["r", 5]]


async def test_a_refusal_comes_back_with_fresh_load_figures() -> None:
    async with connected() as (engine, _, caller, _):
        engine.refusal = wire.pack_refusal(QueueFullError(3, 1.0))
        refusal = await caller.line.submit([REQUEST])
        assert refusal is not None
        assert isinstance(wire.unpack_refusal(refusal), QueueFullError)
        assert caller.loads[-1] == [0, 0, 10, 10, 0, 0.0]


async def test_a_gateway_that_goes_away_has_its_unfinished_requests_aborted() -> None:
    async with connected() as (engine, board, caller, listening):
        await caller.line.submit([REQUEST, REQUEST | {"request_id": "s"}])
        board.deliver(engine.submitted[0][0], [("r", 5, None, "stop", None, None)])
        await until(lambda: caller.events)
        listening.cancel()
        await until(lambda: engine.aborted)
        assert engine.aborted == ["s"]


async def test_an_abort_never_overtakes_its_submit() -> None:
    async with connected() as (engine, _, caller, _):
        submitting = asyncio.create_task(caller.line.submit([REQUEST]))
        await asyncio.sleep(0)
        submitting.cancel()
        caller.line.abort(["r"])
        await until(lambda: engine.aborted)
        assert [request_id for _, request_id in engine.submitted] == engine.aborted == ["r"]


async def test_an_instance_that_goes_away_fails_the_submit_under_way() -> None:
    async with connected() as (engine, board, caller, listening):
        engine.submit = lambda sink, requests: board.close()  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(InstanceUnavailableError):
            await caller.line.submit([REQUEST])
        with pytest.raises(ConnectionError):
            await listening
        with pytest.raises(InstanceUnavailableError):
            await caller.line.submit([REQUEST])


async def test_a_caller_without_the_password_is_hung_up_on() -> None:
    async with connected(token="guess") as (engine, _, _, listening):
        with pytest.raises(ConnectionError):
            await listening
        assert engine.submitted == []


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 20, pack({"a": 1}), pack([]), pack(["hello"])])  # type: ignore[arg-type]
async def test_noise_on_the_port_hurts_nobody(noise: bytes) -> None:
    async with connected() as (_, board, caller, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", board.port)
        writer.write(noise)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert await caller.line.submit([REQUEST]) is None


async def test_a_draining_instance_tells_its_gateways_and_waits_for_their_requests() -> None:
    async with connected() as (engine, board, caller, _):
        await caller.line.submit([REQUEST])
        draining = asyncio.create_task(board.drain(5.0))
        await until(lambda: caller.left)
        assert not draining.done()
        board.deliver(engine.submitted[0][0], [("r", None, None, "stop", None, None)])
        await draining
