"""A server that speaks OpenAI's streams and does exactly what its scripts say: what a load generator's figures are checked
against. It runs no model.

Sockets are written without a framework in between, and every write is noted with its time (`Record`). `time.perf_counter` is
CLOCK_MONOTONIC on Linux, the same for every process, so what a client measured can be compared with what was really sent,
however late a noisy machine made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

MODEL = "scripted"
WORD = " word"  # the text of each token


class Usage(Enum):
    """Which events carry `usage`."""

    PER_CHUNK = "per_chunk"  # every one, when the client asked for that (`continuous_usage_stats`), else the last
    FINAL = "final"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Script:
    """What happens to one request. Times are seconds of delay before each thing, in this order."""

    head_s: float = 0.0
    first_s: float = 0.0  # from the head to the first tokens
    gap_s: float = 0.0  # from when one chunk was due to when the next is
    step_s: float | None = None  # tokens leave at whole multiples of this on the clock instead, as those of a batch do
    tokens: int | None = None  # None: what the request asks
    tokens_per_chunk: int = 1
    usage: Usage = Usage.PER_CHUNK
    extra_usage: int = 0  # tokens that the last usage claims beyond those that were sent
    extra_prompt: int = 0  # prompt tokens that it claims beyond those that came
    finish_reason: str | None = "length"
    done: bool = True  # ends with [DONE]
    line_end: str = "\n"
    status: int = 200  # another one is answered with an error body
    error_after: int | None = None  # an error event after so many chunks
    cut_after: int | None = None  # the connection is cut after so many chunks
    raw_after: int | None = None  # `raw` instead of an event after so many chunks
    raw: bytes = b""
    stall_s: float = 0.0  # when this request comes, the whole server stands still for so long


@dataclass(slots=True)
class Record:
    """What a request really got, seconds on `time.perf_counter`."""

    came_s: float
    chunk_s: list[float] = field(default_factory=list)  # just before each chunk with tokens was handed to the kernel
    chunk_tokens: list[int] = field(default_factory=list)

    @property
    def token_s(self) -> list[float]:
        return [at_s for at_s, tokens in zip(self.chunk_s, self.chunk_tokens, strict=True) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Request:
    """As it came."""

    path: str
    body: Mapping[str, Any]

    @property
    def chat(self) -> bool:
        return "messages" in self.body

    @property
    def index(self) -> int | None:
        """The number that the prompt begins with (its first token id or its first word): which script it gets."""
        prompt = self.body["messages"][0]["content"].split() if self.chat else self.body.get("prompt", "")
        words = prompt.split() if isinstance(prompt, str) else prompt
        return int(words[0]) if words and str(words[0]).isdigit() else None

    @property
    def prompt_tokens(self) -> int:
        prompt = self.body["messages"][0]["content"] if self.chat else self.body["prompt"]
        return len(prompt.split() if isinstance(prompt, str) else prompt)

    @property
    def usage_per_chunk(self) -> bool:
        return bool(self.body.get("stream_options", {}).get("continuous_usage_stats"))


class ScriptedServer:
    """Request n, that is one whose prompt begins with the number n, gets script n modulo their count; a prompt that begins with
    no number gets the first one without its faults, delays and stalls (probes).

    `refuses`: fields of the body, or of its `stream_options`, that are answered with a 400.
    """

    def __init__(self, scripts: Sequence[Script], refuses: Sequence[str] = ()) -> None:
        self._scripts = scripts
        self._refuses = refuses
        self.records: dict[int, Record] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """In the running loop. Yields the URL."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        server = await asyncio.start_server(self._connected, sock=listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while request := await _read_request(reader):
                await self._answer(request, writer)
        writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/records":
            records = {str(index): asdict(record) for index, record in self.records.items()}
            return _write_whole(writer, 200, records)
        if request.path == "/v1/models":
            return _write_whole(writer, 200, {"object": "list", "data": [{"id": MODEL}]})
        if not request.path.endswith("/completions"):
            return _write_whole(writer, 404, {"error": {"message": "not here"}})
        options = request.body.get("stream_options", {})
        refused = [name for name in self._refuses if name in request.body or name in options]
        if refused:
            return _write_whole(writer, 400, {"error": {"message": f"unknown field {refused[0]}"}})
        index = request.index
        script = Script(usage=self._scripts[0].usage) if index is None else self._scripts[index % len(self._scripts)]
        record = Record(time.perf_counter())
        if index is not None:
            self.records[index] = record
        if script.stall_s:
            time.sleep(script.stall_s)  # on purpose: nobody is served meanwhile
        await _pause(script.head_s)
        if script.status != 200:
            return _write_whole(writer, script.status, {"error": {"message": f"scripted status {script.status}"}})
        return await _Stream(script, request, record, writer).run()


class _Stream:
    """Plays one script to one client."""

    def __init__(self, script: Script, request: Request, record: Record, writer: asyncio.StreamWriter) -> None:
        self._script = script
        self._record = record
        self._writer = writer
        self._request = request
        self._per_chunk = request.usage_per_chunk and script.usage is Usage.PER_CHUNK
        self._sent = 0

    async def run(self) -> None:
        script, writer = self._script, self._writer
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if self._request.chat:
            self._event({"role": "assistant", "content": ""}, None)
        due_s = time.perf_counter() + script.first_s
        asked = self._request.body["max_tokens"] if script.tokens is None else script.tokens
        for number in range(-(-asked // script.tokens_per_chunk)):
            await self._wait(due_s)
            if number == script.cut_after:
                return writer.transport.abort()
            if number == script.error_after:
                break
            if number == script.raw_after:
                self._piece(script.raw)
            at_s = self._tokens(min(script.tokens_per_chunk, asked - self._sent))
            due_s = script.gap_s + (due_s if at_s < due_s + script.gap_s else at_s)  # what a stall took is not caught up
        return self._end()

    async def _wait(self, due_s: float) -> None:
        step_s, now_s = self._script.step_s, time.perf_counter()
        if step_s is not None:
            due_s = (now_s // step_s + 1) * step_s
        await _pause(due_s - now_s)

    def _tokens(self, count: int) -> float:
        """Sends so many in one chunk. Returns when."""
        self._sent += count
        at_s = time.perf_counter()
        self._record.chunk_s.append(at_s)
        self._record.chunk_tokens.append(count)
        text = WORD * count
        self._event({"content": text} if self._request.chat else text, None)
        return at_s

    def _end(self) -> None:
        script = self._script
        if script.error_after is not None:
            self._data({"error": {"message": "scripted error", "code": 500}})
        elif script.finish_reason is not None:
            self._event({} if self._request.chat else "", script.finish_reason)
        if script.usage is not Usage.NONE and script.error_after is None:
            self._data({"choices": [], "usage": self._usage(script.extra_usage)})
        if script.done:
            self._piece(f"data: [DONE]{script.line_end * 2}".encode())
        self._writer.write(b"0\r\n\r\n")

    def _usage(self, extra: int = 0) -> dict[str, int]:
        prompt, sent = self._request.prompt_tokens + self._script.extra_prompt, self._sent + extra
        return {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}

    def _event(self, content: Any, finish_reason: str | None) -> None:
        name = "delta" if self._request.chat else "text"
        document = {"id": "cmpl-0", "choices": [{"index": 0, name: content, "logprobs": None, "finish_reason": finish_reason}]}
        self._data(document | {"usage": self._usage()} if self._per_chunk else document)

    def _data(self, document: Mapping[str, Any]) -> None:
        self._piece(f"data: {json.dumps(document)}{self._script.line_end * 2}".encode())

    def _piece(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """None when the client has closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(lines[0].split()[1], json.loads(body) if body else {})


def _write_whole(writer: asyncio.StreamWriter, status: int, document: Mapping[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} Scripted\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@dataclass(frozen=True, slots=True)
class Remote:
    """A scripted server in a process of its own."""

    url: str
    pid: int

    def records(self) -> dict[int, Record]:
        with urllib.request.urlopen(f"{self.url}/records", timeout=30) as response:
            return {int(index): Record(**fields) for index, fields in json.load(response).items()}


@contextlib.contextmanager
def in_own_process(scripts: Sequence[Script], refuses: Sequence[str] = ()) -> Iterator[Remote]:
    """A server that shares neither loop nor interpreter with its clients. Stopped at the end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, scripts, refuses), daemon=True)
    process.start()
    try:
        there.close()
        yield Remote(here.recv(), process.pid or 0)
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, scripts: Sequence[Script], refuses: Sequence[str]) -> None:
    async def serve() -> None:
        async with ScriptedServer(scripts, refuses).serving() as url:
            pipe.send(url)
            await asyncio.Event().wait()

    asyncio.run(serve())
