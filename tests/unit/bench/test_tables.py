"""What the measuring commands make of their samples, and that they would say so if something were wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from aiohttp import web

from pdmux_ray.bench import client, peer, soak
from pdmux_ray.bench.soak_requests import KINDS, pick
from pdmux_ray.errors import PdmuxError

IDLE = {**dict.fromkeys(soak.BUSY, 0.0), soak.FREE_PAGES: 9.0, soak.PAGES: 9.0}


def test_the_ratio_is_that_of_the_medians_over_rounds_and_is_held_to_the_limit() -> None:
    ours = {"ITL 1": [0.010, 0.014, 0.030], "TTFT 256": [0.3, 0.3, 0.3]}
    theirs = {"ITL 1": [0.020, 0.020, 0.020], "TTFT 256": [0.2, 0.4, 0.2]}
    _, itl, ttft = peer.table(ours, theirs, limit=0.8)
    assert itl.split()[:6] == ["ITL", "1", "14.0", "20.0", "0.70", "ok"]
    assert ttft.split()[:6] == ["TTFT", "256", "300.0", "200.0", "1.50", "OVER"]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    samples = {f"ITL {n}": [0.01] for n in peer.ITL_CONCURRENCY} | {f"TTFT {n}": [1.0] for n in peer.TTFT_PROMPT_TOKENS}
    peer.plot(samples, samples, str(tmp_path / "peer.png"))
    assert (tmp_path / "peer.png").read_bytes().startswith(b"\x89PNG")


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
    async def short(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", short)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with client.aiohttp.ClientSession() as session:
            with pytest.raises(PdmuxError, match="did not deliver 4 tokens"):
                await client.stream_completion(session, url, "m", [1], 4)
    finally:
        await runner.cleanup()
