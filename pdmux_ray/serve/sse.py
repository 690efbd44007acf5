"""Server-sent events over plain ASGI. Knows nothing of OpenAI's fields, ray or the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: Any) -> bytes:
    """One event that carries `data` as JSON."""
    return b"data: %b\n\n" % to_json(data).encode()


class Template:
    """An event whose JSON is fixed but for one string: per token only that string is encoded.

    `document` must contain `hole` exactly once, as a value.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, document: Any, hole: str = "\x00") -> None:
        before, after = to_json(document).split(to_json(hole))
        self._before = b"data: " + before.encode()
        self._after = after.encode() + b"\n\n"

    def fill(self, text: str) -> bytes:
        return self._before + to_json(text).encode() + self._after


class EventStream(Response):
    """Sends each chunk as it comes, in one ASGI message.

    Leaner per chunk than a StreamingResponse: no task group, no listener. The server notices a client that goes away, and
    cancels the handler; the generator is closed then, too.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {}))
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own, because waking a task resumes every coroutine on its stack: under a web framework and Serve
        # those are some thirty, for each token. Cancelling this handler cancels the task that it awaits.
        await asyncio.create_task(self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
