"""One streamed request to an OpenAI-compatible server, noted token by token. Knows nothing of servers' insides.

A token's time is when the loop handed its bytes over, before they were parsed. A request uses a connection again that was idle
for less than a second, else its TTFT includes making one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from pdmux_ray.bench.load.answer import QUOTE, Answer, BrokenAnswerError, quoted
from pdmux_ray.bench.load.sse import EventParser, OversizeError
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.workload.requests import Ask, PlannedRequest

MAX_TOKENS_UNASKED = 256  # of an ask that leaves it to the model: some servers would stop at 16 of themselves
IDLE_S = 1.0  # servers close idle connections after 2 s or more: a race with that would look like an error of theirs
UNCONNECTED = "the client had no connection left"  # how the error of such a request begins: no server is to blame
_OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server takes beyond OpenAI's own fields, under the names vLLM gave them."""

    usage_per_chunk: bool = True  # `stream_options.continuous_usage_stats`: tokens are then counted exactly, else estimated
    ignore_eos: bool = True  # else an end token may end an answer early: complete, if its finish reason is "stop"


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how to ask it."""

    url: str
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    dialect: Dialect | None = None  # None: `probed` has not been asked, and it is taken to understand everything

    @property
    def understood(self) -> Dialect:
        return self.dialect or Dialect()

    @property
    def address(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + PATHS[self.endpoint]

    @property
    def headers(self) -> dict[str, str]:
        """Nothing compressed: an encoder would hold tokens back."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", "Accept-Encoding": "identity", **key}


def session() -> aiohttp.ClientSession:
    """For `send`: connections without number and without timeouts; whoever sends decides how long to wait."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


def body(target: Target, ask: Ask) -> bytes:
    """The request as JSON: streamed, greedy, with usage. Raises ConfigError when the endpoint cannot take the prompt."""
    dialect = target.understood
    fields: dict[str, Any] = {"model": target.model, "temperature": 0, "stream": True}
    if target.endpoint == "completions":
        fields["prompt"] = ask.prompt
    elif isinstance(ask.prompt, str):
        fields["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        raise ConfigError("Chat takes texts, and the workload's prompts are token ids. Use completions, or a file of prompts.")
    fields["max_tokens"] = MAX_TOKENS_UNASKED if ask.output_tokens is None else ask.output_tokens
    if ask.output_tokens is not None and dialect.ignore_eos:
        fields["ignore_eos"] = True
    per_chunk = {"continuous_usage_stats": True} if dialect.usage_per_chunk else {}
    fields["stream_options"] = {"include_usage": True, **per_chunk}
    return json.dumps(fields, separators=(",", ":")).encode()


async def send(session: aiohttp.ClientSession, target: Target, planned: PlannedRequest, start_s: float) -> Lifeline:
    """Sends now, and returns when the answer has ended, however it did: see `stream`."""
    lifeline = new_lifeline(planned, start_s)
    await stream(session, target, body(target, planned.ask), lifeline)
    return lifeline


def new_lifeline(planned: PlannedRequest, start_s: float) -> Lifeline:
    """Of a request that is still to be sent. `start_s`: of the run, on `time.perf_counter`."""
    ask = planned.ask
    prompt_tokens = 0 if isinstance(ask.prompt, str) else len(ask.prompt)  # of a text the server tells
    return Lifeline(start_s + planned.due_s, prompt_tokens=prompt_tokens, asked_tokens=ask.output_tokens)


async def stream(
    session: aiohttp.ClientSession,
    target: Target,
    data: bytes,
    lifeline: Lifeline,
    on_events: Callable[[], None] | None = None,
) -> bool:
    """Posts `data` and notes in `lifeline` what comes. Times are seconds on `time.perf_counter`.

    Whatever a server or connection does wrong becomes `Ending.ERROR` with `error`. What is only odd (counts that do not agree,
    no [DONE]) is noted in `error` too, and leaves the ending alone. A cancelled one stays UNFINISHED. `on_events` is called
    after each read that brought events; what it raises ends the request and goes to the caller.

    Returns whether tokens were counted exactly.
    """
    answer = Answer(lifeline, target.understood.ignore_eos)
    lifeline.sent_s = time.perf_counter()
    try:
        async with session.post(target.address, data=data, headers=target.headers, allow_redirects=False) as response:
            if response.status != 200:
                told = quoted(await response.content.read(2000))
                lifeline.fail(time.perf_counter(), f"HTTP {response.status}: {told or response.reason}"[:QUOTE])
            else:
                await _read(response, answer, on_events)
    except asyncio.CancelledError:
        lifeline.ended_s = time.perf_counter()
        raise
    except BrokenAnswerError as error:
        lifeline.fail(time.perf_counter(), str(error))
    except (aiohttp.ClientError, OSError, OversizeError, ValueError) as error:
        own = f"{UNCONNECTED}: " if getattr(error, "errno", None) in _OWN_SHORTAGES else ""
        lifeline.fail(time.perf_counter(), f"{own}{type(error).__name__}: {error}"[:QUOTE])
    return answer.exact


async def _read(response: aiohttp.ClientResponse, answer: Answer, on_events: Callable[[], None] | None) -> None:
    """To the end of the stream."""
    parser, now_s = EventParser(), time.perf_counter()
    async for piece in response.content.iter_any():
        now_s = time.perf_counter()
        events = parser.feed(piece)
        for event in events:
            answer.take(now_s, event)
        if events and on_events is not None:
            on_events()
    for event in parser.end():
        answer.take(now_s, event)
    answer.end(time.perf_counter())


async def probed(session: aiohttp.ClientSession, target: Target) -> Target:
    """The same target with its dialect, by a request of two tokens for each attempt: fields that a server refuses (400, 422)
    are left out. Raises PdmuxError when it does not answer even the plainest."""
    if target.dialect is not None:
        return target
    failure = ""
    for ignore_eos in (True, False):
        for usage_per_chunk in (True, False):
            tried = replace(target, dialect=Dialect(usage_per_chunk, ignore_eos))
            probe = PlannedRequest(0, 0.0, Ask("Hello", 2))
            lifeline = new_lifeline(probe, time.perf_counter())
            exact = await stream(session, tried, body(tried, probe.ask), lifeline)
            if lifeline.token_s and lifeline.finish_reason:
                return replace(tried, dialect=Dialect(usage_per_chunk and exact, ignore_eos))
            failure = lifeline.error or "no token came"
            if not failure.startswith(("HTTP 400", "HTTP 422")):
                break
    raise PdmuxError(f"{target.address} does not answer a request of two tokens: {failure}")


async def ask(session: aiohttp.ClientSession, url: str, model: str, question: str) -> str:
    """One greedy chat answer of at most 32 tokens. Raises PdmuxError."""
    fields: Mapping[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
    }
    async with session.post(f"{url}{PATHS['chat']}", json=fields) as response:
        if response.status != 200:
            raise PdmuxError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        return str((await response.json())["choices"][0]["message"]["content"])
