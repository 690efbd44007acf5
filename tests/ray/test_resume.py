"""An instance is killed while it streams: its clients see nothing of it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.ray.conftest import App, replicas
from tests.ray.test_operation import wait_until

pytestmark = pytest.mark.ray

KEY = {"authorization": "Bearer first-key"}
TOKENS = 60


def ask(app: App, seed: int, ready: Barrier | None = None) -> dict[str, Any]:
    """What a stream shows in all; at its fifth chunk it waits for `ready`."""
    body = {"model": "demo", "prompt": "word " * 30, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    shown: dict[str, Any] = {"text": "", "tokens": [], "logprobs": [], "finish": None, "last": ""}
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, headers=KEY, timeout=60) as response:
        assert response.status_code == 200
        for number, line in enumerate(line[6:] for line in response.iter_lines() if line):
            if number == 5 and ready is not None:
                ready.wait(timeout=30)
            shown["last"] = line
            event = json.loads(line) if line != "[DONE]" else {"choices": []}
            assert "error" not in event, event
            shown["usage"] = event.get("usage") or shown.get("usage")
            for choice in event["choices"]:
                shown["text"] += choice["text"]
                shown["finish"] = choice["finish_reason"] or shown["finish"]
                if choice["logprobs"]:
                    shown["tokens"] += choice["logprobs"]["tokens"]
                    shown["logprobs"] += choice["logprobs"]["token_logprobs"]
    return shown


def resumed(app: App) -> float:
    return app.metric("pdmux_resumed_requests_total", 'outcome="resumed"', key="first-key")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_stream_goes_on_elsewhere_when_its_instance_is_lost(keyed: App, fault: signal.Signals) -> None:
    """Two instances that run one request each: the one that is lost serves either of the two streams."""
    undisturbed = [ask(keyed, seed) for seed in (1, 2)]
    assert undisturbed[0]["text"] != undisturbed[1]["text"]
    assert [shown["usage"]["completion_tokens"] for shown in undisturbed] == [TOKENS] * 2
    pages, moved = keyed.metric("pdmux_instance_pages", key="first-key"), resumed(keyed)
    both, ready = replicas(keyed, "Instance"), Barrier(3)
    assert len(both) == 2
    with ThreadPoolExecutor(2) as clients, ExitStack() as thaw:
        streams = [clients.submit(ask, keyed, seed, ready) for seed in (1, 2)]
        ready.wait(timeout=30)
        os.kill(both[0], fault)
        if fault is signal.SIGSTOP:
            thaw.callback(os.kill, both[0], signal.SIGCONT)
        assert [stream.result() for stream in streams] == undisturbed
    assert undisturbed[0]["last"] == "[DONE]"
    assert resumed(keyed) == moved + 1
    wait_until(lambda: keyed.metric("pdmux_instance_pages", key="first-key") == pages, 60)
    assert (both[0] in replicas(keyed, "Instance")) is (fault is signal.SIGSTOP)
