from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdmux_ray.config import EngineConfig, RoutingConfig
from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.policy.decisions import RouteReason
from pdmux_ray.serve import channel, links, wire
from pdmux_ray.serve.channel import Switchboard, pack
from pdmux_ray.serve.links import Links
from pdmux_ray.serve.mailbox import Mailbox
from pdmux_ray.serve.router import Router, RouterSettings
from pdmux_ray.types import NewRequest, Role, SamplingParams
from tests.local.serve.test_channel import EngineSeen, until

PERIOD_S = 0.01
SETTINGS = RouterSettings(RoutingConfig(policy="remote"), EngineConfig(), disaggregated=True)
PROMPT = [list(range(40))]


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
            "rank": len(self.listed),
            "kv_address": f"{instance_id}:1",
            "metrics_address": f"{instance_id}:2",
            "layers": 8,
            "units": 1,
            "one_pass_tokens": 64.0,
            "kv_bytes_per_token": 1024,
        }
        self.listed.append(description | fields)
        return self.listed[-1]

    async def describe_all(self, timeout_s: float) -> Sequence[Any]:
        return list(self.listed)


@asynccontextmanager
async def linked(fleet: Fleet) -> AsyncIterator[Links]:
    found = Links(fleet.describe_all, "g", PERIOD_S, Router(SETTINGS))
    found.start()
    try:
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def switchboard(fleet: Fleet, instance_id: str, engine: EngineSeen | None = None) -> AsyncIterator[Switchboard]:
    board = Switchboard(engine or EngineSeen())
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
            assert {found.choose(PROMPT)[0].instance_id for _ in range(10)} == {"well"}


async def test_the_placement_sees_each_instance_by_its_newest_rank_and_whether_it_is_fit() -> None:
    fleet = Fleet()
    async with switchboard(fleet, "well"), switchboard(fleet, "unwell"), linked(fleet) as found:
        await until(lambda: len(found.loads()) == 2)
        assert [(each.instance_id, each.rank, each.role, each.fit) for each in found.seen()] == [
            ("well", 0, Role.MUX, True),
            ("unwell", 1, Role.MUX, True),
        ]
        fleet.listed[1] |= {"ailing": True, "rank": 5}
        await until(lambda: found.seen()[1].rank == 5)
        assert not found.seen()[1].fit


async def test_where_metrics_are_is_known_of_instances_without_a_line_too() -> None:
    fleet = Fleet()
    async with switchboard(fleet, "linked"), linked(fleet) as found:
        await until(lambda: len(found.loads()) == 1)
        fleet.listed.clear()  # discovery does not hear from it
        fleet.add("new", 1, "token")
        assert await found.metrics_addresses(1.0) == {"linked": "linked:2", "new": "new:2"}


async def test_a_gateway_that_has_just_begun_does_not_say_that_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.add("one", 1, "token")
    found = Links(fleet.describe_all, "g", PERIOD_S, Router(replace(SETTINGS, instances=2)))
    with pytest.raises(InstanceUnavailableError, match="knows 1 of 2 instances"):
        await found.metrics_addresses(1.0)
    fleet.add("two", 1, "token")
    assert (await found.metrics_addresses(1.0)).keys() == {"one", "two"}
    monkeypatch.setattr(links, "BEGIN_S", 0.0)
    fleet.listed.pop()
    assert (await found.metrics_addresses(1.0)).keys() == {"one"}, "it is known by now that it is gone"


async def test_when_all_instances_are_leaving_it_is_not_open_and_says_so() -> None:
    fleet = Fleet()
    async with switchboard(fleet, "one") as board, linked(fleet) as found:
        await until(found.open)
        await board.drain(0.0)
        await until(lambda: not found.open())
        assert found.troubles() == {"one": "it is leaving"}
        with pytest.raises(InstanceUnavailableError, match="one: it is leaving"):
            found.choose(PROMPT)


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
    monkeypatch.setattr(links, "SEEKING_PERIOD_S", PERIOD_S)
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


class Hanging(EngineSeen):
    """Its step does not end."""

    def load(self) -> wire.PackedLoad:
        return (1, 0, 10, 10, 0, 1e6)


async def test_an_instance_that_hangs_loses_its_requests_to_another_and_keeps_them_while_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "WATCH_PERIOD_S", PERIOD_S)
    monkeypatch.setattr(links, "MIN_RETRY_S", PERIOD_S)
    fleet, hanging, mailbox = Fleet(), Hanging(), Mailbox(lambda: None)
    async with switchboard(fleet, "hangs", hanging), linked(fleet) as found:
        await until(lambda: found.loads())
        await found.by_id["hangs"].submit({0: NewRequest("r", (1,), SamplingParams())}, mailbox, 60.0)
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(5 * PERIOD_S)
        assert not waiting.done()
        async with switchboard(fleet, "well"):
            async with asyncio.timeout(20):
                with pytest.raises(InstanceUnavailableError, match="went away"):
                    await waiting
            await until(lambda: hanging.aborted == ["r"])
            await until(lambda: "hangs" in found.troubles())  # it is linked again, and given nothing


def instance(role: Role) -> EngineSeen:
    """Links itself to whoever it is told of."""
    engine = EngineSeen()
    engine.role = role.value
    return engine


async def test_whoever_decodes_is_told_of_those_that_prefill_and_gets_kv_from_them() -> None:
    fleet, decode, prefill = Fleet(), instance(Role.DECODE), instance(Role.PREFILL)
    async with switchboard(fleet, "d", decode), switchboard(fleet, "p", prefill), linked(fleet) as found:
        await until(lambda: decode.peers == {"p": "p:1"})
        assert prefill.peers == {}
        await until(lambda: len(found.loads()) == 2)
        link, choice = found.choose(PROMPT)
        assert (link.instance_id, choice.prefill, choice.reason) == ("d", (), RouteReason.NO_PREFILL_FIT), "not linked yet"
        await found.assign("d", "decode")  # brings news of its peers before the next heartbeat
        link, choice = found.choose(PROMPT)
        assert (link.instance_id, choice.prefill, choice.reason) == ("d", ("p",), RouteReason.ALWAYS)


async def test_a_prompt_counts_for_whoever_prefills_it_until_its_figures_can_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.01)
    fleet, decode = Fleet(), instance(Role.DECODE)
    async with switchboard(fleet, "d", decode), switchboard(fleet, "p", instance(Role.PREFILL)), linked(fleet) as found:
        await until(lambda: len(found.loads()) == 2 and "p" in found.by_id["d"].peers)
        found.choose(PROMPT)
        assert found.by_id["p"].view().on_their_way_tokens == 40
        assert found.by_id["d"].view().on_their_way_tokens == 0
        await until(lambda: not found.by_id["p"].view().on_their_way_tokens)


async def test_a_role_that_changes_is_known_at_once_to_every_gateway_and_its_peers_are_told() -> None:
    fleet, one, other = Fleet(), instance(Role.MUX), instance(Role.MUX)
    async with (
        switchboard(fleet, "one", one),
        switchboard(fleet, "other", other),
        linked(fleet) as here,
        linked(fleet) as there,
    ):
        await until(lambda: all(len(found.loads()) == 2 for found in (here, there)))
        await here.assign("one", "prefill")
        assert here.by_id["one"].role is Role.PREFILL
        await until(lambda: there.by_id["one"].role is Role.PREFILL)
        await until(lambda: other.peers == {"one": "one:1"})
        assert {found.choose(PROMPT)[0].instance_id for found in (here, there)} == {"other"}
        assert [row["role"] for row in here.listing()] == ["prefill", "mux"]


async def test_a_role_that_is_refused_or_an_instance_that_is_not_there_is_said_so() -> None:
    fleet, engine = Fleet(), instance(Role.MUX)
    async with switchboard(fleet, "one", engine), linked(fleet) as found:
        await until(found.open)
        engine.refusal = wire.pack_refusal(RequestError("there is no topology", "role"))
        with pytest.raises(RequestError, match="no topology"):
            await found.assign("one", "prefill")
        with pytest.raises(RequestError, match="'two'; there are: one"):
            await found.assign("two", "prefill")


async def test_instances_that_are_missing_are_sought_at_once_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SEEKING_PERIOD_S", PERIOD_S)
    fleet, router = Fleet(), Router(RouterSettings(RoutingConfig(), EngineConfig(), disaggregated=True, instances=2))
    found = Links(fleet.describe_all, "g", 60.0, router)
    found.start()
    try:
        async with switchboard(fleet, "one"):
            await until(found.open)
            assert found.troubles() == {"missing": "1 of 2 instances are linked"}
            async with switchboard(fleet, "other"):
                await until(lambda: not found.troubles())
    finally:
        await found.close()
