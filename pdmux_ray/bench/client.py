"""A streaming client for OpenAI-compatible servers that notes when each chunk arrived. Knows nothing of servers' insides."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from pdmux_ray.errors import PdmuxError


@dataclass(slots=True)
class StreamTimes:
    """One request as its client saw it. Seconds on `time.perf_counter`'s clock."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)  # one per chunk that carries a token

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], max_tokens: int
) -> StreamTimes:
    """Streams one greedy completion of exactly `max_tokens` tokens. Raises PdmuxError on an error or a wrong count."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times = StreamTimes(time.perf_counter())
    usage = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise PdmuxError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            # The usage chunk has no choices; parsing every other chunk would cost the client more than it learns.
            if b'"choices":[]' in line.replace(b" ", b""):
                usage = json.loads(line[6:])["usage"]
            elif b'"error"' in line[:20]:
                raise PdmuxError(f"{url} failed mid-stream: {line[:300].decode(errors='replace')}")
            else:
                times.arrivals_s.append(now)
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise PdmuxError(f"{url} did not deliver {max_tokens} tokens: usage {usage}")
    return times


async def ask(session: aiohttp.ClientSession, url: str, model: str, question: str) -> str:
    """One greedy chat answer of at most 32 tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise PdmuxError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        return str((await response.json())["choices"][0]["message"]["content"])
