from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import RequestError
from pdmux_ray.model.source import ModelFiles
from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.serve import wire
from pdmux_ray.serve.completions import INLINE_BYTES, Completions, ModelCard
from pdmux_ray.serve.mailbox import Mailbox
from pdmux_ray.types import NewRequest
from tests.unit.serve.fakes import Letters, metrics


class Tokens(Letters):
    """A tokenizer that notes in which thread it worked."""

    shown_bytes = None  # its text is `decode`'s

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def chat(self, messages: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return [97]

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [ord(char) for char in text[:9]]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Link:
    """An instance that ends every request at its first token, which has no text."""

    context_length, vocab_size, max_waiting = 100, 200, 4

    def __init__(self) -> None:
        self.gateway_id = "g"
        self.submissions: list[Any] = []

    def choose(self, prompts: list[list[int]]) -> tuple[Link, RouteChoice]:
        return self, RouteChoice("one", RouteReason.ONLY_ONE, ("two",) if max(map(len, prompts)) > 5 else ())

    async def submit(self, requests: dict[int, NewRequest], mailbox: Mailbox, left_s: float) -> None:
        self.submissions.append(json.loads(json.dumps(wire.pack_submission(list(requests.values()), left_s))))
        for index, request in requests.items():
            mailbox.put(index, (request.request_id, 0, None, "stop", None, 0))

    def abort(self, request_ids: list[str]) -> None:
        pass


def serving(**config: Any) -> tuple[Completions, Tokens, Link]:
    tokens, link = Tokens(), Link()
    card = ModelCard("m", ModelFiles("m", False, Path()), 0)
    return Completions(card, GatewayConfig(**config), tokens, link, metrics()), tokens, link  # type: ignore[arg-type]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 1} | fields).encode()


async def test_a_small_body_is_read_on_the_event_loop() -> None:
    completions, tokens, _ = serving()
    await completions.complete(body(prompt="x"))
    assert tokens.threads == [threading.current_thread()]


@pytest.mark.parametrize("chat", [True, False])
async def test_a_large_body_is_read_in_a_thread_whatever_it_is_made_of(chat: bool) -> None:
    completions, tokens, _ = serving()
    if chat:
        raw = body(messages=[{"role": "user", "content": ""}] * 1000)
        await completions.chat(raw)
    else:
        raw = body(prompt=["x" * 5000] * 4)
        await completions.complete(raw)
    assert len(raw) > INLINE_BYTES
    assert threading.current_thread() not in tokens.threads


async def test_the_engine_is_told_how_long_a_request_has_left() -> None:
    completions, _, link = serving(request_timeout_s=50.0)
    await completions.complete(body(prompt="x"))
    assert 40.0 < link.submissions[0]["left_s"] <= 50.0


async def test_more_outputs_than_an_instance_lets_wait_are_refused_for_good() -> None:
    completions, _, link = serving()
    with pytest.raises(RequestError, match="lets 4 wait") as refused:
        await completions.complete(body(prompt=["x", "y"], n=3))
    assert refused.value.param == "n"
    await completions.complete(body(prompt=["x", "y"], n=2))
    assert [len(asks) for _, asks in link.submissions[0]["prompts"]] == [2, 2]


async def test_a_request_that_is_answered_is_no_longer_open() -> None:
    completions, _, _ = serving()
    await asyncio.gather(*(completions.complete(body(prompt="x")) for _ in range(3)))
    assert 'pdmux_open_requests{gateway="gateway"} 0.0' in completions._metrics.exposition().decode()


async def test_each_choice_counts_the_tokens_of_its_own_prompt_and_the_last_event_counts_each_prompt_once() -> None:
    completions, _, _ = serving()
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await completions.complete(body(prompt=["abc", "de"], n=2, stream=True, stream_options=options))
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await response({"type": "http"}, None, send)  # type: ignore[arg-type]
    events = [json.loads(line[6:]) for line in b"".join(sent).decode().split("\n\n") if line.startswith("data: {")]
    assert [event["usage"]["prompt_tokens"] for event in events] == [3, 3, 2, 2, 3 + 2]
    assert [event["usage"]["total_tokens"] for event in events] == [4, 4, 3, 3, 3 + 2 + 4]


async def test_a_submission_says_from_whom_kv_may_be_had() -> None:
    completions, _, link = serving()
    await completions.complete(body(prompt="short"))
    await completions.complete(body(prompt="longer"))
    assert [submission["prefill"] for submission in link.submissions] == [[], ["two"]]
