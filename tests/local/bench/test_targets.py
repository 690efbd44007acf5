from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from pdmux_ray.bench.load.targets import (
    MAX_LIST_BYTES,
    TargetError,
    base_url,
    choose_model,
    fit_line,
    plan_solo,
    split_name,
)
from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.requests import Ask
from pdmux_ray.workload.source import load_workload


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1-8000", "http://127.0.0.1:8000")),
        ("ours=http://host/v1", ("ours", "http://host/v1")),
        ("old=runs/1", ("old", "runs/1")),
        ("runs/one", ("one", "runs/one")),
        ("http://host/a=b", ("host", "http://host/a=b")),
    ],
)
def test_a_target_has_a_name_that_a_directory_can_have(text: str, named: tuple[str, str]) -> None:
    assert split_name(text) == named


@pytest.mark.parametrize("text", ["=http://x", "a b=http://x", "..=http://x", "name=", "/"])
def test_names_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        split_name(text)


def test_an_address_may_end_in_v1() -> None:
    assert {base_url(f"http://host:80{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://host:80"}


@pytest.mark.parametrize(
    "text",
    [
        "host:80",
        "ftp://host",
        "http://",
        "http://host:0",
        "http://host:99999",
        "http://h?q=1",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        base_url(text)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="names a user") as raised:
        base_url("http://me:secret@host")
    assert "secret" not in str(raised.value)


def test_a_wrong_address_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match="not the address of a server"):
        split_name("http://[::1")


@contextlib.asynccontextmanager
async def lists(*pieces: bytes) -> AsyncIterator[str]:
    """A server that answers everything with these bytes, and goes on repeating the last of them until nobody listens."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for piece in itertools.chain(pieces, itertools.repeat(pieces[-1], 200)):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("body", [b"[" * MAX_LIST_BYTES, b" " * MAX_LIST_BYTES, b"[" * 10_000])
async def test_a_list_of_models_without_end_is_none(body: bytes) -> None:
    async with lists(b"HTTP/1.1 200 OK\r\n\r\n", body) as url:
        with pytest.raises(TargetError, match="lists no models"):
            await choose_model(url, None, None)


async def test_nobody_is_asked_but_the_server_that_was_named() -> None:
    async with lists(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n") as url:
        with pytest.raises(TargetError, match="sends elsewhere"):
            await choose_model(url, None, "key")


def test_the_line_through_idle_latencies_never_makes_a_limit_that_none_can_meet() -> None:
    assert fit_line([(100, 0.2), (200, 0.3), (300, 0.4)]) == (pytest.approx(0.1), pytest.approx(0.001))
    assert fit_line([(50, 0.3)]) == (0.3, 0.0)
    assert fit_line([(50, 0.3), (50, 0.5)]) == (pytest.approx(0.4), 0.0)  # texts of one length
    assert fit_line([(100, 0.4), (200, 0.2)]) == (pytest.approx(0.3), 0.0)
    assert fit_line([(100, 0.1), (200, 0.4)]) == (0.0, pytest.approx(0.0012))


def test_a_time_that_grows_faster_than_the_length_leaves_short_prompts_their_time() -> None:
    ttft_s, per_token_s = fit_line([(n, 0.02 + 4e-4 * n + 2e-7 * n * n) for n in (20, 60, 200, 600, 1600)])
    assert 0.5 * 0.028 < ttft_s + 20 * per_token_s < 1.1 * 0.028


def test_an_idle_server_is_measured_at_the_workloads_lengths_with_prompts_that_share_nothing() -> None:
    plan = plan_solo(load_workload("sharegpt", token_ids=(10, 1000)).asks(200, 0), (10, 1000), max_context=2048)
    lengths = [{len(prompt) for prompt in prompts} for prompts in plan.prompts]
    assert len(lengths) == 5
    assert all(len(of_one) == 1 for of_one in lengths)
    every = [prompt for prompts in plan.prompts for prompt in prompts]
    assert len({prompt[:8] for prompt in every}) == len(every)


def test_a_capped_context_holds_the_idle_requests_too() -> None:
    plan = plan_solo(load_workload("fixed:100,20", token_ids=(10, 1000)).asks(3, 0), (10, 1000), max_context=110)
    assert (len(plan.prompts[-1][0]), plan.output_tokens) == (90, 20)


def test_texts_are_measured_as_they_are_each_with_a_beginning_of_its_own() -> None:
    plan = plan_solo([Ask("a", None), Ask("b" * 10, None), Ask("c" * 100, 4)], (10, 1000), None)
    assert all(isinstance(prompt, str) for prompts in plan.prompts for prompt in prompts)
    assert [len({str(prompt)[:3] for prompt in prompts}) for prompts in plan.prompts] == [3] * len(plan.prompts)
