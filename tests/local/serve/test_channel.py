from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from pdmux_ray.engine.timeline import Arrival
from pdmux_ray.errors import InstanceUnavailableError, QueueFullError, RequestError
from pdmux_ray.serve import channel, wire
from pdmux_ray.serve.channel import Line, Switchboard, pack
from pdmux_ray.types import NewRequest, SamplingParams


class EngineSeen:
    """Takes what comes in; refuses when told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []  # (sink, request id)
        self.aborted: list[str] = []
        self.refusal: wire.Refusal | None = None
        self.role = "mux"
        self.peers: dict[str, str] = {}

    def standing(self) -> wire.PackedStanding:
        return (self.role, list(self.peers))

    def assume(self, role: str) -> wire.Refusal | None:
        if self.refusal is None:
            self.role = role
        return self.refusal

    def meet(self, peers: Mapping[str, str]) -> None:
        self.peers = dict(peers)

    def submit(self, sink: str, submission: wire.Submission) -> wire.Refusal | None:
        if self.refusal is None:
            self.submitted += [(sink, request_id) for request_id in wire.request_ids(submission)]
        return self.refusal

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def load(self) -> wire.PackedLoad:
        return (len(self.submitted), 0, 10, 10, 0, 0.0)

    def figures(self) -> wire.Figures:
        return {"pdmux_preemptions_total": 7}

    def timeline(self, first: int, seconds: float) -> wire.TimelinePage:
        """Three records in all, two a page; the clock shows 10."""
        marks = [Arrival("arrival", number, 10.0 - number, f"r{number}", 5) for number in range(first, 3)]
        lessons = [["decode", 4, 0, None, 1.25, 80]]
        return {"now_s": 10.0, "units": 4, "records": marks[:2], "more": len(marks) > 2, "lessons": lessons}


class Caller:
    """A gateway's end, and what it has heard."""

    def __init__(self) -> None:
        self.events: list[wire.Event] = []
        self.loads: list[Any] = []
        self.left = False
        self.figures: list[wire.Figures] = []
        self.standings: list[wire.PackedStanding] = []
        self.line = Line(self)

    def on_standing(self, standing: wire.PackedStanding) -> None:
        self.standings.append(standing)

    def on_figures(self, figures: wire.Figures) -> None:
        self.figures.append(figures)

    def on_step(self, load: wire.PackedLoad, events: Sequence[wire.Event]) -> None:
        self.loads.append(load)
        self.events += events

    def on_leaving(self) -> None:
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
    async with asyncio.timeout(20):  # less than the silence after which a side hangs up
        while not condition():
            await asyncio.sleep(0.001)


def asking(*request_ids: str) -> wire.Submission:
    return wire.pack_submission([NewRequest(request_id, (1,), SamplingParams()) for request_id in request_ids], left_s=60.0)


REQUEST = asking("r")


async def test_a_request_is_accepted_and_its_tokens_come_back() -> None:
    async with connected() as (engine, board, caller, _):
        assert await caller.line.submit(REQUEST) is None
        sink, request_id = engine.submitted[0]
        assert request_id == "r"
        await asyncio.to_thread(board.deliver, sink, [("r", 5)])
        await until(lambda: caller.events)
        assert caller.events == [["r", 5]]


async def test_a_refusal_comes_back_with_fresh_load_figures() -> None:
    async with connected() as (engine, _, caller, _):
        engine.refusal = wire.pack_refusal(QueueFullError(3, 1.0))
        refusal = await caller.line.submit(REQUEST)
        assert refusal is not None
        assert isinstance(wire.unpack_refusal(refusal), QueueFullError)
        assert caller.loads[-1] == [0, 0, 10, 10, 0, 0.0]


@pytest.mark.parametrize("peers", [["p"], {"p": 5600}, None], ids=str)
async def test_peers_without_addresses_end_the_line_that_names_them_and_reach_nobody(peers: Any) -> None:
    async with connected() as (engine, _, caller, listening):
        caller.line.name_peers(peers)
        with pytest.raises(ConnectionError):
            await listening
        assert engine.peers == {}


async def test_a_timeline_comes_page_by_page() -> None:
    async with connected() as (_, _, caller, _):
        first, second = await caller.line.timeline(0, 60.0), await caller.line.timeline(2, 60.0)
        assert [record[1] for record in first["records"]] == [0, 1]
        assert [record[1] for record in second["records"]] == [2]
        assert (first["more"], second["more"]) == (True, False)


async def test_whoever_asks_for_a_timeline_is_told_when_the_line_goes_down() -> None:
    async with connected() as (_, _, caller, listening):
        asking = asyncio.ensure_future(caller.line.timeline(0, 60.0))
        await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(InstanceUnavailableError):
            await asking


async def test_a_gateway_that_goes_away_has_its_unfinished_requests_aborted() -> None:
    async with connected() as (engine, board, caller, listening):
        await caller.line.submit(asking("r", "s"))
        board.deliver(engine.submitted[0][0], [("r", 5, None, "stop", None, None)])
        await until(lambda: caller.events)
        listening.cancel()
        await until(lambda: engine.aborted)
        assert engine.aborted == ["s"]


async def test_an_abort_never_overtakes_its_submit() -> None:
    async with connected() as (engine, _, caller, _):
        submitting = asyncio.create_task(caller.line.submit(REQUEST))
        await asyncio.sleep(0)
        submitting.cancel()
        caller.line.abort(["r"])
        await until(lambda: engine.aborted)
        assert [request_id for _, request_id in engine.submitted] == engine.aborted == ["r"]


async def test_an_instance_that_goes_away_fails_the_submit_under_way() -> None:
    async with connected() as (engine, board, caller, listening):
        engine.submit = lambda sink, requests: board.close()  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(InstanceUnavailableError):
            await caller.line.submit(REQUEST)
        with pytest.raises(ConnectionError):
            await listening
        with pytest.raises(InstanceUnavailableError):
            await caller.line.submit(REQUEST)


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
        assert await caller.line.submit(REQUEST) is None


async def test_without_the_password_nobody_may_send_a_large_frame() -> None:
    async with connected() as (_, board, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", board.port)
        writer.write((channel.MAX_HELLO_BYTES + 1).to_bytes(4, "big"))  # hung up on before any of it is read
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()


async def test_an_instance_that_begins_with_a_large_frame_is_hung_up_on() -> None:
    async def boast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((channel.MAX_HELLO_BYTES + 1).to_bytes(4, "big"))
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    async with await asyncio.start_server(boast, "127.0.0.1", 0) as server:
        with pytest.raises(ConnectionError, match="4097 bytes"):
            async with asyncio.timeout(2):
                await Caller().line.listen("127.0.0.1", server.sockets[0].getsockname()[1], "token", "g")
        await asyncio.sleep(0.01)


async def test_of_callers_that_say_nothing_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_STRANGERS", 1)
    async with connected() as (_, board, caller, _):
        _, silent = await asyncio.open_connection("127.0.0.1", board.port)
        await asyncio.sleep(0.02)
        reader, another = await asyncio.open_connection("127.0.0.1", board.port)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        assert await caller.line.submit(REQUEST) is None
        silent.close()
        another.close()


async def test_a_draining_instance_tells_its_gateways_and_waits_for_their_requests() -> None:
    async with connected() as (engine, board, caller, _):
        await caller.line.submit(REQUEST)
        draining = asyncio.create_task(board.drain(5.0))
        await until(lambda: caller.left)
        assert not draining.done()
        board.deliver(engine.submitted[0][0], [("r", None, None, "stop", None, None)])
        await draining


async def test_a_quiet_line_stays_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(channel, "SILENCE_LIMIT_S", 0.5)  # for which a busy machine may stand still
    async with connected() as (_, _, caller, listening):
        await asyncio.sleep(1.2)
        assert not listening.done()
        assert caller.figures[-1] == {"pdmux_preemptions_total": 7}
        assert await caller.line.submit(REQUEST) is None


async def test_a_gateway_hears_of_a_load_that_changes_by_the_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOAD_PERIOD_S", 0.005)
    async with connected() as (engine, _, caller, _):
        engine.submitted.append(("another gateway", "r"))
        await until(lambda: caller.loads[-1][0] == 1)
        await asyncio.sleep(0.02)
        heard = len(caller.loads)
        await asyncio.sleep(0.05)
        assert len(caller.loads) == heard  # nothing has changed


async def test_an_instance_that_falls_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(channel, "SILENCE_LIMIT_S", 0.1)
    async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(5):
                await Caller().line.listen("127.0.0.1", server.sockets[0].getsockname()[1], "token", "g")
        await asyncio.sleep(0.01)


async def test_a_request_too_large_for_the_line_is_refused_and_the_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (engine, _, caller, listening):
        monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 5000)
        with pytest.raises(RequestError, match="at most 5000"):
            await caller.line.submit(asking(*(f"r{number}" for number in range(100))))
        assert await caller.line.submit(REQUEST) is None
        assert [request_id for _, request_id in engine.submitted] == ["r"]
        assert not listening.done()


async def test_a_gateway_of_another_version_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Switchboard(EngineSeen())
    await board.open("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", board.port)
    writer.write(pack(["hello", wire.VERSION + 1, board.token, "g"]))
    kind, why = await channel.read(reader)
    assert kind == "refused"
    assert f"version {wire.VERSION}" in why
    writer.close()
    board.close()


@pytest.mark.parametrize("frame", [["submit", 1, {"nothing": 1}], ["submit"], ["abort", 5], [5]])
async def test_nonsense_from_a_gateway_ends_its_line_at_most(frame: list[Any]) -> None:
    async with connected() as (_, board, caller, _):
        _, writer = await asyncio.open_connection("127.0.0.1", board.port)
        writer.write(pack(["hello", wire.VERSION, board.token, "other"]) + pack(frame))
        await asyncio.sleep(0.02)
        assert await caller.line.submit(REQUEST) is None
        writer.close()
