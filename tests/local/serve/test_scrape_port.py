from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import generate_latest

from pdmux_ray.metrics.catalog import Component
from pdmux_ray.metrics.exporter import registry_of
from pdmux_ray.serve.scrape_port import MOST, ScrapePort

REGISTRY = registry_of(Component.CONTROLLER, lambda: {"pdmux_placement_stale": 1.0})


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    port = ScrapePort(REGISTRY, "127.0.0.1", [b"one", b"two"])
    yield f"http://{port.address}"
    port.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{port.address}/metrics")


def test_a_scrape_with_one_of_the_keys_gets_the_figures(keyed: str) -> None:
    for key in ("one", "two"):
        answer = httpx.get(f"{keyed}/metrics", headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.content) == (200, generate_latest(REGISTRY))


@pytest.mark.parametrize("header", ["", "Bearer three", "Basic one", "one"])
def test_a_scrape_without_a_key_gets_none(keyed: str, header: str) -> None:
    answer = httpx.get(f"{keyed}/metrics", headers={"authorization": header} if header else {})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert b"pdmux" not in answer.content


def test_there_is_nothing_else_on_the_port(keyed: str) -> None:
    assert httpx.get(f"{keyed}/", headers={"authorization": "Bearer one"}).status_code == 404


def test_connections_that_say_nothing_take_so_many_threads_and_no_more(keyed: str) -> None:
    host, _, port = keyed.removeprefix("http://").rpartition(":")
    idle = [socket.create_connection((host, int(port)), timeout=5) for _ in range(MOST)]
    with socket.create_connection((host, int(port)), timeout=5) as one_more:
        assert one_more.recv(1) == b"", "it is closed"
    for each in idle:
        each.close()
    header = {"authorization": "Bearer one"}
    answers = (_status(f"{keyed}/metrics", header) for _ in range(500))
    assert next(status for status in answers if status is not None) == 200


def _status(url: str, header: dict[str, str]) -> int | None:
    """None: the connection was closed."""
    try:
        return httpx.get(url, headers=header).status_code
    except httpx.TransportError:
        time.sleep(0.01)
        return None


def test_an_address_of_ipv6_is_written_so_that_a_url_can_have_it() -> None:
    try:
        port = ScrapePort(REGISTRY, "::1")
    except OSError:
        pytest.skip(reason="this machine has no IPv6 loopback")
    try:
        assert port.address.startswith("[::1]:")
        assert httpx.get(f"http://{port.address}/metrics").status_code == 200
    finally:
        port.close()
