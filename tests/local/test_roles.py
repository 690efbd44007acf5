"""`pdmux role`, against a server that knows two instances."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pdmux_ray import cli


class Fleet(BaseHTTPRequestHandler):
    """Refuses whoever has not the key."""

    def do_GET(self) -> None:
        self._answer(self.path == "/admin/instances")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.roles[asked["instance"]] = asked["role"]  # type: ignore[attr-defined]
        self._answer(self.path == "/admin/role")

    def _answer(self, found: bool) -> None:
        allowed = self.headers["authorization"] == "Bearer k"
        roles: dict[str, str] = self.server.roles  # type: ignore[attr-defined]
        listed = [{"id": i, "role": r, "running": 1, "waiting": 0, "trouble": ""} for i, r in roles.items()]
        body: dict[str, Any] = {"instances": listed} if allowed else {"error": {"message": "A valid API key is needed"}}
        self.send_response(200 if found and allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Fleet) as server:
        server.roles = {"abcd": "mux", "abxy": "prefill"}  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_without_arguments_the_instances_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["role", "--url", url, "--api-key", "k"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["id", "role"],
        ["abcd", "mux"],
        ["abxy", "prefill"],
    ]


def test_the_beginning_of_an_id_is_enough(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["role", "abx", "decode", "--url", url, "--api-key", "k"]) == 0
    assert "abxy  decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ab", "mux", "--api-key", "k"], "2 instances have an id that begins with 'ab'; there are: abcd, abxy"),
        (["q", "mux", "--api-key", "k"], "0 instances have an id that begins with 'q'"),
        (["abcd", "--api-key", "k"], "give an instance and its new role"),
        ([], "answers HTTP 401: A valid API key is needed"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(["role", *arguments, "--url", url]) == 2
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["role", "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be asked" in capsys.readouterr().err
