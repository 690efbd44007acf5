"""One request over a real socket, to a server that follows a script."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Sequence

import pytest

from pdmux_ray.bench.load import client
from pdmux_ray.bench.load.client import Dialect, Target
from pdmux_ray.bench.scripted_server import Script, ScriptedServer, Usage
from pdmux_ray.bench.server import free_port
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.workload.requests import Ask, PlannedRequest

TOKENS = 6


async def answer(script: Script, prompt: tuple[int, ...] | str = (0, 5, 5), **target: object) -> Lifeline:
    async with ScriptedServer([script]).serving() as url, client.session() as session:
        planned = PlannedRequest(0, 0.0, Ask(prompt, TOKENS))
        return await client.send(session, Target(url, "m", **target), planned, time.perf_counter())  # type: ignore[arg-type]


async def dialect(script: Script, refuses: Sequence[str]) -> Dialect | None:
    async with ScriptedServer([script], refuses).serving() as url, client.session() as session:
        return (await client.probed(session, Target(url, "m"))).dialect


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("usage", [Usage.PER_CHUNK, Usage.FINAL])
async def test_an_answer_is_complete_whatever_its_line_ends_and_counts(line_end: str, usage: Usage) -> None:
    lifeline = await answer(Script(tokens_per_chunk=4, line_end=line_end, usage=usage))
    assert (lifeline.ending, lifeline.error, lifeline.finish_reason) == (Ending.COMPLETE, None, "length")
    assert (len(lifeline.token_s), lifeline.prompt_tokens) == (TOKENS, 3)
    assert lifeline.due_s <= lifeline.sent_s <= lifeline.token_s[0] <= lifeline.token_s[-1] <= lifeline.ended_s


async def test_chat_is_understood_too() -> None:
    lifeline = await answer(Script(), prompt="0 how are you", endpoint="chat")
    assert (lifeline.ending, len(lifeline.token_s), lifeline.prompt_tokens) == (Ending.COMPLETE, TOKENS, 4)


@pytest.mark.parametrize(
    ("script", "ending", "tokens", "error"),
    [
        (Script(status=503), Ending.ERROR, 0, 'HTTP 503: {"error": {"message": "scripted status 503"}}'),
        (Script(error_after=2), Ending.ERROR, 2, "error event: scripted error"),
        (Script(cut_after=2, gap_s=0.01), Ending.ERROR, 2, "Error: "),
        (Script(raw_after=2, raw=b"data: <html>\n\n"), Ending.ERROR, 2, "<html>"),
        (Script(raw_after=2, raw=b"x" * (2 << 20)), Ending.ERROR, 2, "OversizeError"),
        (Script(raw_after=2, raw=b": still here\n\n"), Ending.COMPLETE, TOKENS, None),
        (Script(finish_reason=None), Ending.ERROR, TOKENS, "without a finish reason"),
        (Script(finish_reason=None, done=False), Ending.ERROR, TOKENS, "cut off"),
        (Script(done=False), Ending.COMPLETE, TOKENS, "without [DONE]"),
        (Script(tokens=4), Ending.TRUNCATED, 4, None),
        (Script(tokens=0), Ending.TRUNCATED, 0, None),
        (Script(extra_usage=1), Ending.COMPLETE, TOKENS, "usage states 7 tokens, 6 came"),
        (Script(extra_prompt=2), Ending.COMPLETE, TOKENS, "usage states 5 prompt tokens, 3 were sent"),
        (Script(usage=Usage.NONE), Ending.COMPLETE, TOKENS, "no usage"),
    ],
    ids=lambda value: "" if not isinstance(value, Script) else None,
)
async def test_whatever_a_server_does_is_told(script: Script, ending: Ending, tokens: int, error: str | None) -> None:
    lifeline = await answer(script)
    assert (lifeline.ending, len(lifeline.token_s)) == (ending, tokens)
    assert error is None if lifeline.error is None else str(error) in lifeline.error
    assert lifeline.ended_s >= lifeline.sent_s


async def test_a_client_without_files_left_does_not_blame_the_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with ScriptedServer([Script()]).serving() as url, client.session() as session:
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            lifeline = await client.send(session, Target(url, "m"), PlannedRequest(0, 0.0, Ask((0,), 2)), time.perf_counter())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(lifeline.error).startswith(client.UNCONNECTED)


async def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    async with client.session() as session:
        target = Target(f"http://127.0.0.1:{free_port()}", "m")
        lifeline = await client.send(session, target, PlannedRequest(0, 0.0, Ask((1,), 2)), time.perf_counter())
    assert lifeline.ending is Ending.ERROR
    assert "Cannot connect" in str(lifeline.error)


async def test_a_request_that_is_given_up_keeps_what_came() -> None:
    async with ScriptedServer([Script(gap_s=30.0)]).serving() as url, client.session() as session:
        planned = PlannedRequest(0, 0.0, Ask((0,), 2))
        lifeline = client.new_lifeline(planned, time.perf_counter())
        target = Target(url, "m")
        task = asyncio.create_task(client.stream(session, target, client.body(target, planned.ask), lifeline))
        while not lifeline.token_s:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
    assert (lifeline.ending, len(lifeline.token_s)) == (Ending.UNFINISHED, 1)
    assert lifeline.ended_s >= lifeline.token_s[0]


@pytest.mark.parametrize("usage_per_chunk", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_fields_that_a_server_refuses_are_left_out(usage_per_chunk: bool, ignore_eos: bool) -> None:
    taken = {"continuous_usage_stats": usage_per_chunk, "ignore_eos": ignore_eos}
    assert await dialect(Script(), [name for name, takes in taken.items() if not takes]) == Dialect(usage_per_chunk, ignore_eos)


async def test_a_server_that_takes_a_field_and_does_nothing_about_it_is_found_out() -> None:
    assert await dialect(Script(usage=Usage.FINAL), []) == Dialect(usage_per_chunk=False, ignore_eos=True)


async def test_a_server_that_refuses_everything_is_named_with_what_it_said() -> None:
    with pytest.raises(PdmuxError, match="unknown field max_tokens"):
        await dialect(Script(), ["max_tokens"])


def test_token_ids_cannot_be_asked_of_chat() -> None:
    with pytest.raises(ConfigError, match="Use completions"):
        client.body(Target("http://x", "m", endpoint="chat"), Ask((1, 2), 3))
