"""The servers that are measured: names, addresses, and whether they answer at all. And their latency when idle."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from pdmux_ray.bench.load import client
from pdmux_ray.bench.load.client import Target
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.lifeline import Ending, Lifeline, quantile
from pdmux_ray.metrics.slo_text import SoloLatency
from pdmux_ray.workload.requests import Ask, PlannedRequest

PROBE_TIMEOUT_S = 60.0  # of the requests before the load
MAX_LIST_BYTES = 1 << 20  # of /v1/models
SOLO_REPEATS = 3
SOLO_OUTPUT_TOKENS = 32
_SOLO_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_SOLO_SEED = 0x5010  # prompts that no run has


class TargetError(PdmuxError):
    """A server cannot be measured: it cannot be reached, or answers no request."""


def split_name(text: str) -> tuple[str, str]:
    """`name=URL-or-directory`, or one of them alone, whose name is then made from it. Raises ConfigError."""
    name, equals, place = text.partition("=")
    if not equals or "/" in name:
        place = text
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.split("/")[2]) if is_url(text) else Path(text).resolve().name
    if is_url(place):
        base_url(place)  # what is wrong with an address is told as such
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or not place:
        raise ConfigError(
            f"{text!r}: give an address like http://127.0.0.1:8000, or name=URL or name=DIRECTORY, with letters, digits, '.', "
            "'_' and '-' in the name."
        )
    return name, place


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def base_url(text: str) -> str:
    """Without `/v1` and slashes at the end. Raises ConfigError when it is no address of a server."""
    try:
        parts = urlsplit(text)
        usable = is_url(text) and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        usable = False
    if "@" in text:
        raise ConfigError("The address names a user. Write it like http://127.0.0.1:8000; a key goes into the environment.")
    if not usable:
        raise ConfigError(f"{text!r} is not the address of a server. Write it like http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


async def choose_model(url: str, model: str | None, api_key: str | None) -> str:
    """`model`, when the server has it or does not list any; without one the first that it lists.

    Raises TargetError, or ConfigError when the server has others only.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.get(f"{url}/v1/models", headers=headers, allow_redirects=False) as response,
        ):
            if 300 <= response.status < 400:
                raise TargetError(f"{url} sends elsewhere ({response.status}). Give the address it sends to.")
            if response.status in (401, 403):
                raise TargetError(f"{url} asks for an API key ({response.status}). Give it with --api-key.")
            listed = _model_ids(await _first_bytes(response)) if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = getattr(error, "os_error", None) or str(error) or type(error).__name__
        raise TargetError(f"{url} cannot be reached: {reason}. Is it up?") from None
    if model is None and not listed:
        raise TargetError(f"{url} lists no models. Give the model's name with --model.")
    if model is not None and listed and model not in listed:
        raise ConfigError(f"{url} has no model {model!r}. It has {', '.join(listed[:20])}{', …' if len(listed) > 20 else ''}.")
    return model or listed[0]


async def _first_bytes(response: aiohttp.ClientResponse) -> bytes:
    """No more than MAX_LIST_BYTES: a list that is longer is none."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_LIST_BYTES:
            return b""
    return body


def _model_ids(body: bytes) -> list[str]:
    """Of /v1/models. Empty where a server has something else there."""
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


async def checked(target: Target) -> Target:
    """The target as it wants to be asked, once it has answered a request of two tokens. Raises TargetError."""
    try:
        async with client.session() as session, asyncio.timeout(PROBE_TIMEOUT_S):
            return await client.probed(session, target)
    except TimeoutError:
        raise TargetError(f"{target.url} did not answer a request of two tokens in {PROBE_TIMEOUT_S:.0f} s.") from None
    except ConfigError:
        raise
    except PdmuxError as error:
        raise TargetError(str(error)) from None


@dataclass(frozen=True, slots=True)
class SoloPlan:
    """Prompts for a server that is idle: a few lengths, each as often as it is repeated, none with the beginning of another."""

    prompts: Sequence[Sequence[tuple[int, ...] | str]]  # ascending lengths
    output_tokens: int


def plan_solo(asks: Sequence[Ask], token_ids: tuple[int, int], max_context: int | None) -> SoloPlan:
    """At the lengths that 10, 30, 50, 70 and 90 % of the prompts of `asks`, a workload's sample, stay below."""
    outputs = [ask.output_tokens for ask in asks if ask.output_tokens is not None]
    output_tokens = max(2, min(SOLO_OUTPUT_TOKENS, round(statistics.median(outputs)) if outputs else SOLO_OUTPUT_TOKENS))
    if texts := sorted((ask.prompt for ask in asks if isinstance(ask.prompt, str)), key=len):
        middles = sorted({round(q * (len(texts) - 1)) for q in _SOLO_QUANTILES})
        return SoloPlan([[f"({n}) {texts[middle]}" for n in range(SOLO_REPEATS)] for middle in middles], output_tokens)
    tokens = sorted(len(ask.prompt) for ask in asks)
    most = tokens[-1] if max_context is None else max(1, max_context - output_tokens)
    lengths = sorted({min(most, round(quantile(tokens, q))) for q in _SOLO_QUANTILES})
    rng = random.Random(_SOLO_SEED)
    prompts = [[tuple(rng.choices(range(*token_ids), k=n)) for _ in range(SOLO_REPEATS)] for n in lengths]
    return SoloPlan(prompts, output_tokens)


async def measure_solo(
    target: Target, plan: SoloPlan, on_progress: Callable[[float], None] = lambda share: None
) -> SoloLatency:
    """The server's latency for one request at a time. `on_progress` gets the share of the work that is done. Raises TargetError
    when a request does not complete."""
    done: list[list[Lifeline]] = []
    await _alone(target, Ask(plan.prompts[-1][0][::-1], 2))  # the first long one may find memory that is not there yet
    for index, prompts in enumerate(plan.prompts):
        on_progress(index / len(plan.prompts))
        done.append([await _alone(target, Ask(prompt, plan.output_tokens)) for prompt in prompts])
    solo = solo_latency(done)
    if solo is None:
        raise TargetError(f"{target.url} sends all tokens of an answer at once, so there is no ITL to take multiples of.")
    return solo


def solo_latency(done: Sequence[Sequence[Lifeline]]) -> SoloLatency | None:
    """Of complete requests that each had the server to themselves, by length of prompt. None when there is no ITL."""
    points = [
        (
            statistics.median(lifeline.prompt_tokens for lifeline in alike),
            statistics.median(lifeline.token_s[0] - lifeline.sent_s for lifeline in alike),
        )
        for alike in done
    ]
    gaps_s = [gap for alike in done for lifeline in alike for gap in lifeline.gaps_s]
    return SoloLatency(*fit_line(points), statistics.median(gaps_s)) if gaps_s else None


async def _alone(target: Target, ask: Ask) -> Lifeline:
    try:
        async with client.session() as session, asyncio.timeout(PROBE_TIMEOUT_S):
            lifeline = await client.send(session, target, PlannedRequest(0, 0.0, ask), time.perf_counter())
    except TimeoutError:
        raise TargetError(
            f"{target.url} did not complete a request in {PROBE_TIMEOUT_S:.0f} s with nothing else to do."
        ) from None
    if lifeline.ending is not Ending.COMPLETE:
        what = f"{lifeline.ending.value}{f': {lifeline.error}' if lifeline.error else ''}"
        raise TargetError(f"{target.url} did not complete a request with nothing else to do ({what}).")
    return lifeline


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the line with the least squares of relative errors, neither below 0: a line that falls, or cuts
    below 0, would make limits that no server can meet. Relative, because times grow faster than lengths: the longest prompts
    alone would decide, and leave the shortest ones no time at all."""
    if len(points) < 2:
        return points[0][1], 0.0
    if len({x for x, _ in points}) == 1:  # texts of one length, or a server that does not count them
        return statistics.fmean(y for _, y in points), 0.0
    weights = [1 / (y * y) for _, y in points]
    mean_x, mean_y = (statistics.fmean(values, weights) for values in zip(*points, strict=True))
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    if slope < 0:
        return statistics.fmean(y for _, y in points), 0.0
    if (intercept := mean_y - slope * mean_x) < 0:
        return 0.0, sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points)
    return intercept, slope
