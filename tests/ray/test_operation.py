"""Health, metrics, clients that go away, engines that stall, replicas that die."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdmux_ray import cli
from pdmux_ray.bench.load import client_health
from pdmux_ray.bench.load.session import read_requests, read_units
from pdmux_ray.bench.timeline import fetch
from pdmux_ray.metrics.trace import DECODE, arrivals_of, events_of
from tests.ray.conftest import App, replicas

pytestmark = pytest.mark.ray

SOON_S, TRIES = 0.1, 8
LONG = {"model": "demo", "prompt": "word " * 100, "max_tokens": 350, "ignore_eos": True}


def wait_until(condition: Any, timeout_s: float) -> float:
    """Seconds until it holds."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < timeout_s
        time.sleep(0.005)
    return time.monotonic() - begin_s


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_pages_within_100_ms(either: App, stream: bool) -> None:
    assert _time_to_free_s(either, [LONG | {"stream": stream}] * TRIES) <= SOON_S


def test_a_client_that_leaves_amid_a_long_prefill_frees_its_pages_within_100_ms(slow: App) -> None:
    """Without giving up, the prefill would hold them for another two seconds."""
    bodies = [{"model": "demo", "prompt": [token] * 110, "max_tokens": 1} for token in range(7, 7 + TRIES)]
    assert _time_to_free_s(slow, bodies) <= SOON_S


def test_the_metrics_parse_and_count(app: App) -> None:
    before = app.metric("pdmux_generated_tokens_total")
    httpx.post(f"{app.url}/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 12}, timeout=30)
    shown = httpx.get(f"{app.url}/metrics", timeout=30).text
    families = {family.name: family for family in text_string_to_metric_families(shown)}
    assert app.metric("pdmux_generated_tokens_total") == before + 12
    assert families["pdmux_time_to_first_token_seconds"].type == "histogram"
    assert families["pdmux_requests"].type == "counter"
    assert families["pdmux_steps"].samples[0].labels.keys() == {"gateway", "instance", "reason"}
    wait_until(lambda: app.metric("pdmux_engine_generated_tokens_total") >= 12, 30)
    assert families["pdmux_instance_free_pages"].samples[0].labels.keys() == {"gateway", "instance"}


def test_the_timeline_shows_what_the_engine_did_on_this_machines_clock(either: App) -> None:
    before_s = time.monotonic()
    body = {"model": "demo", "prompt": [7, 8, 9], "max_tokens": 12}
    httpx.post(f"{either.url}/v1/completions", json=body, timeout=30)
    found = fetch(either.url, time.monotonic() - before_s)
    assert found is not None
    (instance,) = found.instances
    assert found.offset_s == 0.0
    assert [tokens for at_s, tokens in arrivals_of(found.trace, instance) if at_s > before_s] == [3]
    slices = events_of(found.trace, instance, "X")
    assert sum(event["args"]["decodes"] for event in slices if event["tid"] == DECODE) == 11  # the prefill gives the first
    assert sum(event["dur"] for event in slices) <= (time.monotonic() - before_s) * 1e6


def test_a_bench_of_this_server_shows_the_units_of_its_lanes(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_health, "judged", lambda *_: None)  # this machine may be busy: asked in tests/bench
    options = ["--workload", "fixed:20,8", "--rates", "8", "--requests", "12", "--slo", "ttft=5", "--out", str(tmp_path)]
    assert cli.main(["bench", app.url, *options]) == 0
    samples = read_units(tmp_path)
    assert samples[0].time_s <= min(line.token_s[0] for line in read_requests(tmp_path, 1)[0])  # the first request's prefill
    assert max(sample.prefill_units for sample in samples) > 0 < max(sample.decode_units for sample in samples)
    assert "Units per lane" in (tmp_path / "report.html").read_text()


def test_a_timeline_of_each_instance_or_of_one_asks_for_a_key(keyed: App) -> None:
    def ask(query: str, key: str = "first-key") -> httpx.Response:
        return httpx.get(f"{keyed.url}/debug/timeline{query}", headers={"authorization": f"Bearer {key}"}, timeout=30)

    both = ask("").json()["otherData"]["instances"]
    assert len(both) == 2
    one = next(iter(both))
    assert set(ask(f"?instance={one}").json()["otherData"]["instances"]) == {one}
    assert (ask("?instance=none").status_code, ask("", key="wrong").status_code) == (400, 401)
    assert one in ask("?instance=none").json()["error"]["message"]


def test_refused_and_disconnected_requests_are_counted_as_such(app: App) -> None:
    refused = app.metric("pdmux_requests_total", 'outcome="refused"')
    httpx.post(f"{app.url}/v1/chat/completions", json={"model": "demo"}, timeout=30)
    assert app.metric("pdmux_requests_total", 'outcome="refused"') == refused + 1
    assert app.metric("pdmux_requests_total", 'outcome="disconnected"') >= 1


def test_health_turns_503_while_the_engine_stalls_and_says_why(slow: App) -> None:
    body = {"model": "demo", "prompt": [7] * 110, "max_tokens": 1}  # 2.2 s of prefill in one step
    asking = threading.Thread(target=httpx.post, args=(f"{slow.url}/v1/completions",), kwargs={"json": body, "timeout": 30})
    asking.start()
    assert "step" in told_until(slow, 503)[-1]
    asking.join()
    wait_until(lambda: httpx.get(f"{slow.url}/health", timeout=30).status_code == 200, 30)


def test_a_request_that_runs_too_long_is_504_and_ended(slow: App) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
    response = httpx.post(f"{slow.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "deadline" in response.json()["error"]["message"]  # the engine's own word: it has freed the pages
    wait_until(lambda: not slow.busy(), 30)


def test_an_error_after_streaming_began_is_in_the_stream(slow: App) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    response = httpx.post(f"{slow.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line]
    assert '"error"' in lines[-1]
    assert "[DONE]" not in response.text


def test_a_dead_instance_fails_its_requests_with_an_error_and_is_replaced(either: App) -> None:
    body = LONG | {"stream": True}
    with httpx.stream("POST", f"{either.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(replicas(either, "Instance")[0], signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "went away" in rest[-1]
    assert httpx.get(f"{either.url}/health", timeout=30).status_code == 503
    either.wait_until_healthy()
    answer = either.openai().completions.create(model="demo", prompt="x", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"


def test_an_instance_that_hangs_does_not_keep_a_new_one_from_being_found(keyed: App) -> None:
    hanging, dead = replicas(keyed, "Instance")
    os.kill(hanging, signal.SIGSTOP)
    try:
        os.kill(dead, signal.SIGKILL)
        told_until(keyed, 503)
        assert any("no word from it" in each for each in told_until(keyed, 200))
    finally:
        os.kill(hanging, signal.SIGCONT)
    wait_until(lambda: httpx.get(f"{keyed.url}/health", timeout=30).json()["troubles"] == {}, 30)


def test_a_dead_gateway_leaves_no_request_running(app: App) -> None:
    def read() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{app.url}/v1/completions", json=LONG, timeout=60)

    asking = threading.Thread(target=read)
    asking.start()
    wait_until(app.busy, 30)
    os.kill(replicas(app, "Gateway")[0], signal.SIGKILL)
    asking.join()
    app.wait_until_healthy()
    assert not app.busy()  # 350 tokens would have taken longer than a new gateway


def told_until(app: App, status: int) -> list[str]:
    """The troubles of each answer until one has that status."""
    told: list[str] = []

    def comes() -> bool:
        answer = httpx.get(f"{app.url}/health", timeout=30)
        told.append(str(answer.json()["troubles"]))
        return answer.status_code == status

    wait_until(comes, 60)
    return told


def _time_to_free_s(app: App, bodies: list[dict[str, Any]]) -> float:
    """From a client's leaving until nothing of its request is left: of the first of `bodies` with which that was soon, or of
    the best, since what else the machine does is not what is measured."""
    took_s = [math.inf]
    for body in bodies:
        if min(took_s) <= SOON_S:
            break
        connection = send(app.url, body)
        wait_until(app.busy, 30)
        time.sleep(0.2)
        connection.close()
        took_s.append(wait_until(lambda: not app.busy(), 30))
    return min(took_s)


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """Sends a completion request and does not read the answer."""
    parts = urlsplit(f"{url}/v1/completions")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((parts.hostname, parts.port))
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.hostname}\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection
