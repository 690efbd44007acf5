"""The HTTP surface, without a server: requests go straight into the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.serve import http
from pdmux_ray.serve.tracing import UNTRACED, Headers, Trace


class Echo:
    """A gateway that answers with the length of what it was sent."""

    max_body_bytes = 100
    begins = False

    def __init__(self, *keys: bytes) -> None:
        self.api_keys = frozenset(keys)
        self.role = "mux"

    async def chat(self, raw: bytes, trace: Trace) -> Response:
        return JSONResponse({"bytes": len(raw)})

    complete = chat

    def trace(self, path: str, headers: Headers) -> Trace:
        return UNTRACED

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m"}]

    def health(self) -> tuple[bool, dict[str, str]]:
        return True, {}

    def exposition(self) -> bytes:
        return b""

    async def targets(self) -> list[dict[str, Any]]:
        if self.begins:
            raise InstanceUnavailableError("This gateway has just begun.")
        return [{"targets": ["127.0.0.1:1"], "labels": {"component": "gateway"}}]

    def instances(self) -> list[dict[str, Any]]:
        return [{"id": "one", "role": self.role}]

    async def assign(self, instance: str, role: str) -> None:
        if instance != "one":
            raise RequestError(f"There is no instance {instance!r}.")
        self.role = role

    async def timeline(self, instance: str | None, seconds: float) -> bytes:
        return f'["{instance}", {seconds}]'.encode()


KEYED = ["/v1/models", "/v1/models/m", "/metrics", "/metrics/targets", "/debug/timeline"]
PATHS = ["/health", "/version", *KEYED]


def client(*keys: bytes) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(http.build_http_app(Echo(*keys))), base_url="http://gateway")


@pytest.mark.parametrize("header", ["Bearer k1", "bearer k1", "BEARER  k1"])
async def test_the_scheme_of_a_key_may_be_written_in_any_case(header: str) -> None:
    async with client(b"k1", b"k2") as to:
        assert (await to.get("/v1/models", headers={"authorization": header})).status_code == 200


@pytest.mark.parametrize("header", ["k1", "Basic k1", "Bearer", "Bearer ", "Bearer k1 k2", "Bearerk1", ""])
async def test_a_key_without_its_scheme_or_another_key_is_refused(header: str) -> None:
    async with client(b"k1", b"k2") as to:
        reply = await to.get("/v1/models", headers={"authorization": header})
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(http, "BODY_S", 0.01)
    async with client() as to:
        reply = await to.post("/v1/completions", content=endless())
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "request_timeout"
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("Identity", 200), ("gzip", 415), ("br", 415)])
async def test_a_compressed_body_is_refused_as_such(encoding: str, status: int) -> None:
    async with client() as to:
        reply = await to.post("/v1/completions", content=b"{}", headers={"content-encoding": encoding})
    assert reply.status_code == status
    assert status == 200 or reply.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", PATHS)
async def test_what_can_be_read_can_be_asked_for_its_head(path: str) -> None:
    async with client() as to:
        assert (await to.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("query", "asked"), [("", ["None", 60.0]), ("?instance=a&seconds=2.5", ["a", 2.5]), ("?seconds=0", ["None", 0.0])]
)
async def test_a_timeline_is_of_one_instance_or_all_and_of_the_last_minute_unless_told(query: str, asked: list[Any]) -> None:
    async with client() as to:
        assert (await to.get(f"/debug/timeline{query}")).json() == asked


@pytest.mark.parametrize("seconds", ["-1", "x", "inf", "nan", ""])
async def test_seconds_of_a_timeline_that_are_no_number_are_refused(seconds: str) -> None:
    async with client() as to:
        reply = await to.get(f"/debug/timeline?seconds={seconds}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "seconds")


async def test_a_timeline_asks_for_a_key() -> None:
    async with client(b"k1") as to:
        assert (await to.get("/debug/timeline")).status_code == 401


async def test_a_path_with_a_slash_too_many_is_not_found_instead_of_sent_elsewhere() -> None:
    async with client() as to:
        reply = await to.post("/v1/completions/", content=b"{}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("content", [b"x" * 101, [b"x" * 60] * 2])
async def test_a_body_over_the_limit_is_refused_whether_or_not_its_length_was_told(content: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in content:
            yield piece

    async with client() as to:
        reply = await to.post("/v1/completions", content=content if isinstance(content, bytes) else pieces())
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"


async def test_an_instance_is_given_another_role() -> None:
    async with client() as to:
        assert (await to.get("/admin/instances")).json() == {"instances": [{"id": "one", "role": "mux"}]}
        reply = await to.post("/admin/role", json={"instance": "one", "role": "prefill"})
        assert (reply.status_code, reply.json()["instances"][0]["role"]) == (200, "prefill")


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b'{"instance": "one"}', b'{"instance": "two", "role": "mux"}'])
async def test_a_role_for_nobody_is_refused(content: bytes) -> None:
    async with client() as to:
        assert (await to.post("/admin/role", content=content)).status_code == 400


async def test_roles_ask_for_a_key() -> None:
    async with client(b"k") as to:
        assert (await to.get("/admin/instances")).status_code == 401
        assert (await to.post("/admin/role", json={"instance": "one", "role": "prefill"})).status_code == 401


@pytest.mark.parametrize("path", KEYED)
async def test_what_tells_of_traffic_asks_for_a_key(path: str) -> None:
    async with client(b"k1") as to:
        assert (await to.get(path)).status_code == 401
        assert (await to.get(path, headers={"authorization": "Bearer k1"})).status_code == 200


async def test_targets_are_in_the_form_of_prometheus_service_discovery() -> None:
    async with client() as to:
        assert (await to.get("/metrics/targets")).json() == [{"targets": ["127.0.0.1:1"], "labels": {"component": "gateway"}}]


async def test_targets_that_are_not_all_known_yet_are_an_error_on_which_prometheus_keeps_its_list() -> None:
    gateway = Echo()
    gateway.begins = True
    transport = httpx.ASGITransport(http.build_http_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as to:
        reply = await to.get("/metrics/targets")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "This gateway has just begun.")
