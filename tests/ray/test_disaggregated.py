"""One instance that prefills and one that decodes, over NIXL, behind one server: what clients see of faults and new roles."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdmux_ray import cli
from pdmux_ray.config import AppConfig, FakeConfig, GatewayConfig, RoutingConfig, TopologyConfig, TransferConfig
from tests.ray.conftest import App, fake_engine
from tests.ray.test_operation import send, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]

PAGE_WORDS = 20  # of a prompt that is longer than a page: a shorter one is not fetched
SOON_S, TRIES = 0.5, 5  # what else the machine does is not what is measured
WORDS = 300  # of a prompt: its prefill takes seconds, block by block
CONFIG = AppConfig(
    served_model_name="demo",
    topology=TopologyConfig(prefill=1, decode=1),
    engine=fake_engine(
        fake=FakeConfig(step_s=0.01, prefill_s_per_token=0.003),
        mode="split",
        multiplex={"policy": "fixed", "block_layers": 1},
        prefix_cache=False,
        transfer=TransferConfig(silence_s=1.0, checksum=True),
    ),
    gateway=GatewayConfig(discovery_period_s=0.5, routing=RoutingConfig(policy="remote")),
)


class Pair(App):
    """The two instances by what they do."""

    def instances(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = httpx.get(f"{self.url}/admin/instances", timeout=30).json()["instances"]
        return listed

    def named(self, role: str) -> str:
        (found,) = (each["id"] for each in self.instances() if each["role"] == role)
        return str(found)

    def joined(self) -> bool:
        """Whether the one that decodes can get KV from the one that prefills."""
        listed = {each["role"]: each for each in self.instances() if not each["trouble"]}
        return listed.keys() == {"prefill", "decode"} and listed["prefill"]["id"] in listed["decode"]["peers"]

    def running(self, instance: str) -> int:
        return next(int(each["running"]) for each in self.instances() if each["id"] == instance)

    def routes(self, reason: str) -> float:
        return self.metric("pdmux_routed_requests_total", f'reason="{reason}"')

    def choices(self, reason: str) -> float:
        return self.metric("pdmux_fetch_choices_total", f'reason="{reason}"')

    def fetches(self, reason: str) -> float:
        return self.metric("pdmux_fetches_total", f'reason="{reason}"')

    def pid(self, instance: str) -> int:
        import ray

        replica = ray.get_actor(f"SERVE_REPLICA::{self.name}#Instance#{instance}", namespace="serve")
        pid: int = ray.get(replica.__ray_call__.remote(lambda _: os.getpid()))
        return pid


@pytest.fixture(scope="module")
def server(served: str) -> Iterator[Pair]:
    from ray import serve

    from pdmux_ray.serve.app import build_app

    serve.run(build_app(CONFIG), name="pair", route_prefix="/pair")
    yield Pair(f"{served}/pair", "pair")
    serve.delete("pair")


@pytest.fixture
def pair(server: Pair) -> Iterator[Pair]:
    """Both are well and linked, before a test and after it, and no page is left behind."""
    wait_until(server.joined, 60)
    yield server
    wait_until(server.joined, 60)
    for pages in ("leased", "quarantined"):
        wait_until(lambda pages=pages: server.metric(f"pdmux_instance_{pages}_pages") == 0, 30)


def ask(app: App, seed: int, words: int = WORDS, tokens: int = 8) -> str:
    body = {"model": "demo", "prompt": f"{seed}" + " word" * words, "seed": seed, "max_tokens": tokens, "ignore_eos": True}
    reply = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == tokens
    return str(reply.json()["choices"][0]["text"])


def test_answers_are_those_of_one_instance(pair: Pair, app: App) -> None:
    landed = pair.fetches("landed")
    for seed in range(3):
        assert ask(pair, seed, words=40) == ask(app, seed, words=40)
    wait_until(lambda: pair.fetches("landed") == landed + 3, 30)
    received, used = (pair.metric(f"pdmux_kv_{name}_tokens_total") for name in ("received", "used"))
    assert received == used > 0


# Kind of request -> endpoint, what is asked beside model and length, prompts that are prefilled for it.
TEXT = "word " * 40
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a prompt": ("completions", {"prompt": TEXT}, 1),
    "token ids": ("completions", {"prompt": list(range(1000, 1040))}, 1),
    "several prompts": ("completions", {"prompt": [TEXT, TEXT + "more"]}, 2),
    "several choices": ("completions", {"prompt": TEXT, "n": 3}, 3),
    "log probabilities": ("completions", {"prompt": TEXT, "logprobs": 2}, 1),
    "a stream": ("completions", {"prompt": TEXT, "stream": True}, 1),
    "a chat": ("chat/completions", CHAT, 1),
    "a chat that is streamed": ("chat/completions", CHAT | {"stream": True}, 1),
    "choices of a chat": ("chat/completions", CHAT | {"n": 2}, 2),
    "log probabilities of a chat": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, 1),
    "penalties": ("completions", {"prompt": TEXT, "repetition_penalty": 1.2, "presence_penalty": 0.5}, 1),
    "one token": ("completions", {"prompt": TEXT, "max_tokens": 1}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_is_fetched_and_answered_as_by_one_instance(pair: Pair, app: App, kind: str) -> None:
    endpoint, fields, prompts = KINDS[kind]
    body = {"model": "demo", "seed": 5, "max_tokens": 4, **fields}
    routed, landed = pair.routes("always"), pair.fetches("landed")
    answer, expected = (httpx.post(f"{each.url}/v1/{endpoint}", json=body, timeout=60) for each in (pair, app))
    assert (answer.status_code, said(answer)) == (200, said(expected))
    assert pair.routes("always") == routed + 1
    wait_until(lambda: pair.fetches("landed") >= landed + prompts, 30)
    assert pair.fetches("landed") == landed + prompts


def test_a_prompt_of_which_nothing_can_be_fetched_says_so(pair: Pair) -> None:
    """It is shorter than a page."""
    short, fetched = pair.choices("cached"), pair.metric("pdmux_fetches_total")
    ask(pair, 1, words=2)
    wait_until(lambda: pair.choices("cached") == short + 1, 30)
    assert pair.metric("pdmux_fetches_total") == fetched


def said(answer: httpx.Response) -> list[Any]:
    """All choices of an answer; of a stream its text."""
    if "event-stream" not in answer.headers["content-type"]:
        return list(answer.json()["choices"])
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return ["".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_request_is_answered_when_the_instance_that_prefills_it_is_lost_amid_the_transfer(
    pair: Pair, app: App, fault: signal.Signals
) -> None:
    prefill = pair.named("prefill")
    pid = pair.pid(prefill)
    reason = "peer_dead" if fault is signal.SIGKILL else "peer_silent"
    lost = pair.fetches(reason)
    with ThreadPoolExecutor(1) as client, contextlib.ExitStack() as thaw:
        answer = client.submit(ask, pair, 7)
        wait_until(lambda: pair.running(prefill) == 1, 30)
        os.kill(pid, fault)
        if fault is signal.SIGSTOP:
            thaw.callback(os.kill, pid, signal.SIGCONT)
        assert answer.result() == ask(app, 7)
        assert ask(pair, 8, words=PAGE_WORDS) == ask(app, 8, words=PAGE_WORDS), "nor do later ones wait for it"
        wait_until(lambda: pair.fetches(reason) == lost + 1, 30)
    landed = pair.fetches("landed")
    wait_until(pair.joined, 60)
    ask(pair, 9, words=PAGE_WORDS)
    wait_until(lambda: pair.fetches("landed") == landed + 1, 30)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_amid_a_transfer_frees_both_instances(pair: Pair, stream: bool, choices: int) -> None:
    """Row 27. The prefill alone would go on for a second."""
    prefill, decode = pair.named("prefill"), pair.named("decode")
    took_s = []
    for seed in range(TRIES):
        dropped, generated = pair.fetches("dropped"), pair.metric("pdmux_engine_generated_tokens_total")
        body = {"model": "demo", "prompt": f"{seed}" + " word" * WORDS, "n": choices, "max_tokens": 8, "stream": stream}
        connection = send(pair.url, body)
        wait_until(lambda: pair.running(prefill) > 0 and pair.running(decode) == choices, 30)
        connection.close()
        took_s.append(wait_until(lambda: (pair.running(prefill), pair.running(decode)) == (0, 0), 30))
        wait_until(lambda dropped=dropped: pair.fetches("dropped") == dropped + choices, 30)
        assert pair.metric("pdmux_engine_generated_tokens_total") == generated
        if took_s[-1] <= SOON_S:
            break
    assert min(took_s) <= SOON_S


def test_roles_change_while_requests_run(pair: Pair, app: App) -> None:
    prefill, decode = pair.named("prefill"), pair.named("decode")
    pids = [pair.pid(prefill), pair.pid(decode)]
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, pair, 3, words=PAGE_WORDS, tokens=150)
        wait_until(lambda: pair.running(decode) == 1, 30)
        for instance, role in ((prefill, "decode"), (decode, "prefill")):
            assert cli.main(["role", instance, role, "--url", pair.url]) == 0
        assert (pair.named("prefill"), pair.named("decode")) == (decode, prefill)
        wait_until(pair.joined, 30)
        assert ask(pair, 4, words=PAGE_WORDS) == ask(app, 4, words=PAGE_WORDS)
        assert answer.result() == ask(app, 3, words=PAGE_WORDS, tokens=150)
    wait_until(lambda: pair.metric("pdmux_fetches_total", f'instance="{prefill}",reason="landed"') == 1, 30)
    for instance, role in ((prefill, "prefill"), (decode, "decode")):
        assert cli.main(["role", instance, role, "--url", pair.url]) == 0
    assert [pair.pid(prefill), pair.pid(decode)] == pids


def test_a_role_is_refused_where_kv_cannot_move(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    (instance,) = (each["id"] for each in httpx.get(f"{app.url}/admin/instances", timeout=30).json()["instances"])
    assert cli.main(["role", instance, "prefill", "--url", app.url]) == 2
    assert "has no topology" in capsys.readouterr().err
