from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdmux_ray.errors import InstanceUnavailableError
from pdmux_ray.serve import channel, links, wire
from pdmux_ray.serve.channel import Switchboard, pack
from pdmux_ray.serve.links import Links
from tests.unit.serve.test_channel import EngineSeen, until

PERIOD_S = 0.01


class Fleet:
    """Instances as discovery lists them."""

    def __init__(self) -> None:
        self.listed: list[Any] = []

    def add(self, instance_id: str, port: int, token: str, **fields: Any) -> dict[str, Any]:
        description = {
            "instance_id": instance_id,
            "address": ("127.0.0.1", port, token),
            "context_length": 100,
            "vocab_size": 100,
            "max_waiting": 8,
            "ailing": False,
        }
        self.listed.append(description | fields)
        return self.listed[-1]

    async def describe_all(self, timeout_s: float) -> Sequence[Any]:
        return list(self.listed)


@asynccontextmanager
async def linked(fleet: Fleet) -> AsyncIterator[Links]:
    found = Links(fleet.describe_all, "g", PERIOD_S, stall_timeout_s=60.0)
    found.start()
    try:
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def switchboard(fleet: Fleet, instance_id: str) -> AsyncIterator[Switchboard]:
    board = Switchboard(EngineSeen())
    await board.open("127.0.0.1")
    fleet.add(instance_id, board.port, board.token)
    try:
        yield board
    finally:
        board.close()
        await asyncio.sleep(0.01)


async def test_one_unwell_instance_of_several_closes_nothing_and_is_named() -> None:
    fleet = Fleet()
    async with switchboard(fleet, "well"), switchboard(fleet, "unwell"):
        fleet.listed[1]["ailing"] = True
        async with linked(fleet) as found:
            await until(lambda: found.open() and len(found.by_id) == 2 and len(found.loads()) == 2)
            assert found.troubles() == {"unwell": "its engine is not well; its log says why"}
            assert {found.choose()[0].instance_id for _ in range(10)} == {"well"}


async def test_when_all_instances_are_leaving_it_is_not_open_and_says_so() -> None:
    fleet = Fleet()
    async with switchboard(fleet, "one") as board, linked(fleet) as found:
        await until(found.open)
        await board.drain(0.0)
        await until(lambda: not found.open())
        assert found.troubles() == {"one": "it is leaving"}
        with pytest.raises(InstanceUnavailableError, match="one: it is leaving"):
            found.choose()


async def test_an_instance_of_another_version_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "MIN_RETRY_S", PERIOD_S)
    tries = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await channel.read(reader)
        writer.write(pack(["refused", f"this instance speaks version {wire.VERSION + 1}"]))
        await writer.drain()
        writer.close()

    fleet = Fleet()
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server, linked(fleet):
        fleet.add("newer", server.sockets[0].getsockname()[1], "token")
        await until(lambda: tries >= 3)
    assert [r.getMessage() for r in caplog.records if "speaks version" in r.getMessage()] == [
        f"The line to instance newer is lost (this instance speaks version {wire.VERSION + 1}), and 0 requests with it."
    ]


@pytest.mark.parametrize("frame", [["step", [1, 2], []], ["step"], ["reply", 1], ["step", [0, 0, 9, 9, 0, 0.0], [5]]])
async def test_an_instance_that_speaks_nonsense_is_tried_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, frame: list[Any]
) -> None:
    monkeypatch.setattr(links, "MIN_RETRY_S", 0.01)
    monkeypatch.setattr(links, "LONELY_PERIOD_S", PERIOD_S)
    times_s: list[float] = []

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times_s.append(asyncio.get_running_loop().time())
        writer.write(pack(frame))
        await reader.read()
        writer.close()

    fleet = Fleet()
    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server, linked(fleet) as found:
        fleet.add("odd", server.sockets[0].getsockname()[1], "token")
        await until(lambda: len(times_s) == 4)
        assert times_s[3] - times_s[2] >= 0.04
        await until(lambda: not found.open())
        async with switchboard(fleet, "even"):  # discovery goes on
            await until(found.open)


async def test_discovery_survives_any_answer() -> None:
    fleet = Fleet()
    fleet.listed += [OSError("it hangs"), {"no": "instance"}]
    async with linked(fleet) as found:
        await asyncio.sleep(3 * PERIOD_S)
        fleet.listed = [OSError("it hangs")]
        async with switchboard(fleet, "one"):
            await until(found.open)
            assert found.open()
