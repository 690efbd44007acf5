"""The kinds of request a soak sends, each with the outcomes it may have.

An outcome is "complete" (a whole, well-formed answer), "left" (the client went away) or an HTTP status other than 200.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdmux_ray.bench.load import client
from pdmux_ray.bench.load.client import Target
from pdmux_ray.metrics.lifeline import Lifeline

Run = Callable[[aiohttp.ClientSession, str, str, random.Random], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request. `weight`: its share of the mix."""

    name: str
    weight: int
    expected: frozenset[str]
    run: Run


def _prompt(rng: random.Random, longest: int = 700) -> list[int]:
    """Token ids; a third of the prompts share a prefix, so that cached pages are shared and evicted."""
    length = rng.choice((1, 15, 16, 17, rng.randint(2, 64), rng.randint(64, longest)))
    shared = list(range(2000, 2000 + min(length, 200))) if rng.random() < 0.33 else []
    return shared + [rng.randrange(1000, 40000) for _ in range(length - len(shared) + 1)]


def _body(model: str, rng: random.Random, **extra: Any) -> dict[str, Any]:
    sampling = rng.choice(
        (
            {"temperature": 0},
            {"temperature": 1.0, "seed": rng.randrange(2**31)},
            {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
            {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
        )
    )
    return {"model": model, "prompt": _prompt(rng), "max_tokens": rng.randint(1, 48), **sampling, **extra}


async def _whole(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return str(response.status) if answer["error"]["message"] else "an error without a message"
    choices, usage = answer["choices"], answer["usage"]
    if len(choices) != body.get("n", 1) or any(c["finish_reason"] not in ("stop", "length") for c in choices):
        return f"incomplete: {choices}"
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return f"wrong usage: {usage}"
    if usage["completion_tokens"] > body["max_tokens"] * len(choices):
        return f"too many tokens: {usage}"
    return "complete"


class _LeftError(Exception):
    """The client goes away, as it meant to."""


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave_after: int | None = None) -> str:
    """Reads a stream to its [DONE], or leaves after `leave_after` tokens."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    lifeline = Lifeline(time.perf_counter())

    def leave_in_time() -> None:
        if leave_after is not None and len(lifeline.token_s) > leave_after:
            raise _LeftError

    try:
        await client.stream(session, Target(url, body["model"]), json.dumps(body).encode(), lifeline, on_events=leave_in_time)
    except _LeftError:
        return "left"
    if lifeline.error is None and lifeline.finish_reason in ("stop", "length"):
        return "complete"
    error = lifeline.error or f"finish reason {lifeline.finish_reason}"
    return error.removeprefix("HTTP ").partition(":")[0] if error.startswith("HTTP ") else error


async def whole(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    extra = rng.choice(({}, {"n": 2}, {"logprobs": 3}, {"stop": ["the", " a"]}, {"min_tokens": 1, "ignore_eos": True}))
    return await _whole(session, url, _body(model, rng, **extra))


async def stream(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    return await _stream(session, url, _body(model, rng))


async def leave_amid(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    body = _body(model, rng, ignore_eos=True)
    return await _stream(session, url, {**body, "max_tokens": 200}, leave_after=rng.randint(1, 20))


async def leave_before(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    """The client gives up after a few milliseconds, streaming or not."""
    body = _body(model, rng, ignore_eos=True)
    send = (
        _stream(session, url, {**body, "max_tokens": 200})
        if rng.random() < 0.5
        else _whole(session, url, {**body, "max_tokens": 200})
    )
    try:
        return await asyncio.wait_for(send, timeout=rng.uniform(0.001, 0.2))
    except TimeoutError:
        return "left"


def _bad(rng: random.Random, model: str) -> dict[str, Any]:
    good = {"model": model, "prompt": "Hello", "max_tokens": 4}
    return rng.choice(
        (
            {**good, "temperature": 99},
            {**good, "top_p": "high"},
            {**good, "max_tokens": -1},
            {**good, "max_tokens": 2.5},
            {**good, "prompt": ""},
            {**good, "prompt": []},
            {**good, "prompt": [1, 2, 10**9]},
            {**good, "prompt": [1, -2]},
            {**good, "prompt": {"text": "x"}},
            {**good, "prompt": [5] * 20000},
            {**good, "n": 0},
            {**good, "n": 10**6},
            {**good, "stop": [1]},
            {**good, "stream": "maybe"},
            {**good, "logprobs": 10**4},
            {**good, "logit_bias": "all"},
            {"prompt": "no model", "max_tokens": 1},
        )
    )


async def bad_input(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    return await _whole(session, url, _bad(rng, model))


async def bad_body(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    data = rng.choice((b"{", b"", b"[1, 2]", b"\xff\xfe", b'"text"', b'{"model": "' + model.encode() + b'", "prompt": '))
    async with session.post(f"{url}/v1/completions", data=data, headers={"Content-Type": "application/json"}) as response:
        answer = await response.json()
        return str(response.status) if answer["error"]["message"] else "an error without a message"


async def unknown_model(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    return await _whole(session, url, {"model": model + "-not", "prompt": "Hello", "max_tokens": 4})


async def too_large(session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    return await _whole(session, url, {"model": model, "prompt": "x" * (6 * 2**20), "max_tokens": 4})


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("whole", 30, frozenset({"complete"}), whole),
        Kind("stream", 30, frozenset({"complete"}), stream),
        Kind("leave amid the answer", 14, frozenset({"left"}), leave_amid),
        Kind("leave before the answer", 10, frozenset({"left", "complete"}), leave_before),
        Kind("bad input", 8, frozenset({"400"}), bad_input),
        Kind("bad body", 4, frozenset({"400"}), bad_body),
        Kind("unknown model", 3, frozenset({"404"}), unknown_model),
        Kind("too large", 1, frozenset({"413"}), too_large),
    )
}


def pick(rng: random.Random) -> Kind:
    """A kind, by weight."""
    return rng.choices(list(KINDS.values()), [k.weight for k in KINDS.values()])[0]
