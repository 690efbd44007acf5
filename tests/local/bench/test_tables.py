"""What the measuring commands make of their samples, and that they would say so if something were wrong."""

from __future__ import annotations

import random

import pytest

from pdmux_ray.bench import peer, soak, soak_requests
from pdmux_ray.bench.load import client
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.scripted_server import Script, ScriptedServer, Usage
from pdmux_ray.bench.soak_requests import KINDS, pick
from pdmux_ray.errors import PdmuxError

IDLE = {**dict.fromkeys(soak.BUSY, 0.0), soak.FREE_PAGES: 9.0, soak.PAGES: 9.0}


def test_the_ratio_is_that_of_the_medians_over_rounds_and_is_held_to_the_limit() -> None:
    ours = {"ITL 1": [0.010, 0.014, 0.030], "TTFT 256": [0.3, 0.3, 0.3]}
    theirs = {"ITL 1": [0.020, 0.020, 0.020], "TTFT 256": [0.2, 0.4, 0.2]}
    _, itl, ttft = peer.table(ours, theirs, limit=0.8)
    assert itl.split()[:6] == ["ITL", "1", "14.0", "20.0", "0.70", "ok"]
    assert ttft.split()[:6] == ["TTFT", "256", "300.0", "200.0", "1.50", "OVER"]


def test_an_idle_server_with_all_pages_free_has_no_leaks() -> None:
    assert soak.leaks(IDLE) == []


@pytest.mark.parametrize(
    ("gauge", "value"), [(soak.BUSY[0], 1.0), (soak.BUSY[2], -1.0), (soak.FREE_PAGES, 8.0), (soak.PAGES, 0.0)]
)
def test_whatever_an_idle_server_still_holds_is_a_leak(gauge: str, value: float) -> None:
    assert soak.leaks({**IDLE, gauge: value}) != []


def test_missing_gauges_are_not_taken_for_an_exact_account() -> None:
    assert len(soak.leaks({})) == len(soak.BUSY) + 1


def test_a_soak_report_fails_on_a_wrong_outcome_and_on_growing_memory(capsys: pytest.CaptureFixture[str]) -> None:
    good = soak.Report(memory_mib=[90.0, 100.0, 100.0, 101.0])
    good.add(KINDS["whole"], "complete")
    assert soak.print_report(good, IDLE)
    grown = soak.Report(memory_mib=[90.0, 100.0, 100.0, 106.0])
    assert not soak.print_report(grown, IDLE)
    good.add(KINDS["bad input"], "500")
    assert not soak.print_report(good, IDLE)
    assert "WRONG" in capsys.readouterr().out


def test_every_kind_of_request_comes_up_in_the_mix() -> None:
    rng = random.Random(0)
    assert {pick(rng).name for _ in range(2000)} == set(KINDS)


async def test_a_stream_that_stops_short_is_an_error_not_a_fast_answer() -> None:
    async with ScriptedServer([Script(tokens=1)]).serving() as url, client.session() as session:
        with pytest.raises(PdmuxError, match="did not deliver 4 tokens: truncated, 1 came"):
            await peer.complete(session, Target(url, "m"), [0], 4)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script(), "complete"),
        (Script(status=400), "400"),
        (Script(done=False), "the stream ended without [DONE]"),
        (Script(usage=Usage.NONE), "the server states no usage"),
        (Script(error_after=1), "error event: scripted error"),
        (Script(finish_reason="abort"), "finish reason abort"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_soak_names_what_was_wrong_with_a_stream(script: Script, outcome: str) -> None:
    async with ScriptedServer([script]).serving() as url, client.session() as session:
        body = {"model": "m", "prompt": [0, 7], "max_tokens": 5}
        assert await soak_requests._stream(session, url, body) == outcome


async def test_a_soak_can_leave_amid_a_stream() -> None:
    async with ScriptedServer([Script(gap_s=0.001)]).serving() as url, client.session() as session:
        body = {"model": "m", "prompt": [0, 7], "max_tokens": 500}
        assert await soak_requests._stream(session, url, body, leave_after=2) == "left"
