"""Server-sent events over plain ASGI. Knows nothing of OpenAI's fields, ray or the engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger("ray.serve")

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
    cancels the handler; the generator is closed then, too. `on_end` is called however it ends, also when it is cancelled before
    the generator has begun. At `cut_s` (the loop's clock) it ends in any case: also a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], on_end: Callable[[], None], cut_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end
        self._cut_s = cut_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own, because waking a task resumes every coroutine on its stack: under a web framework and Serve
        # those are some thirty, for each token. Cancelling this handler cancels the task that it awaits.
        try:
            async with asyncio.timeout_at(self._cut_s):
                await asyncio.create_task(self._send_all(send))
        except TimeoutError:
            log.warning("A client did not read its answer to the end in time; the answer is cut off.")
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
