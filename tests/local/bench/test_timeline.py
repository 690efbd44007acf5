"""`pdmux timeline`, and what `pdmux bench` takes of a server's timeline."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import parse_qs, urlsplit

import pytest

from pdmux_ray import cli
from pdmux_ray.bench.load.targets import TargetError
from pdmux_ray.bench.timeline import MAX_EMPTY_BYTES, Fetched, fetch, run_samples
from pdmux_ray.engine.timeline import Arrival, Record, Step
from pdmux_ray.metrics.trace import Source, arrivals_of, chrome_trace
from pdmux_ray.report.series import UnitsSample

Answer = Callable[[dict[str, str]], tuple[int, bytes]]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers GET /debug/timeline, given the query, with status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            query["key"] = self.headers.get("authorization", "")
            status, body = answer(query) if parts.path == "/debug/timeline" else (404, b"")
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def step(begin_s: float, end_s: float) -> Step:
    return Step("step", 0, begin_s, end_s, "lanes_both", "split", "fits", 3, 1, 2, 0, 0, 0.019, 0.022)


def told(*records: Record, behind_s: float = 0.0) -> Answer:
    """By a server whose clock is `behind_s` behind ours."""

    def answer(query: dict[str, str]) -> tuple[int, bytes]:
        kept = records if query["seconds"] != "0" else ()
        return 200, json.dumps(chrome_trace([Source("one", 4, kept)], time.perf_counter() - behind_s)).encode()

    return answer


def fetched(url: str, seconds: float = 60.0) -> Fetched:
    found = fetch(url, seconds)
    assert found is not None
    return found


def test_a_server_on_this_machine_has_our_clock() -> None:
    with served(told(Arrival("arrival", 0, 5.0, "r", 9))) as url:
        found = fetched(url)
    assert (found.offset_s, arrivals_of(found.trace, "one")) == (0.0, [(5.0, 9)])


def test_the_clock_of_another_machine_is_aligned_by_what_it_shows_now() -> None:
    with served(told(behind_s=1000.0)) as url:
        assert fetched(url).offset_s == pytest.approx(1000.0, abs=0.5)


def test_the_key_the_instance_and_the_time_are_asked_for() -> None:
    asked: list[dict[str, str]] = []

    def answer(query: dict[str, str]) -> tuple[int, bytes]:
        asked.append(query)
        return told()(query)

    with served(answer) as url:
        fetch(url, 7.5, "secret", "one")
    assert asked == [{"seconds": s, "instance": "one", "key": "Bearer secret"} for s in ("0", "7.5")]


def test_a_server_without_a_timeline_has_none() -> None:
    with served(lambda query: (404, b"")) as url:
        assert fetch(url, 60.0) is None


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"no key", "answers HTTP 401: no key"),
        (200, b"<html>", "cannot be read"),
        (200, b"[" * 100_000, "cannot be read"),
        (200, b" " * (MAX_EMPTY_BYTES + 1), "cannot be read: more than"),
        (200, b"[]", "is no timeline of this version"),
        (200, b'{"otherData": {"now_s": 1, "missing": {}, "instances": {"a": {}}}}', "is no timeline of this version"),
    ],
)
def test_an_answer_that_is_no_timeline_is_an_error(status: int, body: bytes, words: str) -> None:
    with served(lambda query: (status, body)) as url, pytest.raises(TargetError, match=words):
        fetch(url, 60.0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\x00\xff what?\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat?\r\n", "cannot be read"),
        (b"HTTP/1.1 302 Found\r\nlocation: %b/debug/timeline\r\ncontent-length: 0\r\n\r\n", "answers HTTP 302"),
    ],
)
def test_what_is_no_answer_is_an_error_and_nobody_else_is_asked(said: bytes, words: str) -> None:
    with served(told()) as elsewhere, socket.create_server(("127.0.0.1", 0)) as listener:

        def say() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(said.replace(b"%b", elsewhere.encode()))

        thread = Thread(target=say)
        thread.start()
        with pytest.raises(TargetError, match=words):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}", 60.0, "secret")
        thread.join()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"])
def test_whoever_says_nothing_or_one_byte_now_and_then_is_not_waited_for(said: bytes) -> None:
    given_up = Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as client, suppress(OSError):
                client.sendall(said)
                while said and not given_up.wait(0.01):
                    client.sendall(b" ")
                given_up.wait()

        thread = Thread(target=drip)
        thread.start()
        with pytest.raises(TargetError, match="not whole after"):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}", 60.0, patience_s=0.1)
        given_up.set()
        thread.join()


def test_a_runs_units_are_on_its_own_clock_those_of_all_instances_together() -> None:
    trace = chrome_trace([Source("one", 4, [step(12.0, 13.0)]), Source("two", 4, [step(12.5, 30.0)])], 99.0)
    samples = run_samples(Fetched(trace, offset_s=100.0), begin_s=110.0, end_s=120.0, run=3)
    assert samples == [UnitsSample(2.0, 0, 1, 3), UnitsSample(2.5, 0, 2, 3), UnitsSample(3.0, 0, 1, 3)]


def test_the_command_writes_a_trace_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.html"
    with served(told(Arrival("arrival", 0, 1.0, "r", 9), step(1.0, 1.02), step(1.02, 1.04))) as url:
        assert cli.main(["timeline", url, "--out", str(trace), "--picture", str(picture)]) == 0
    assert json.loads(trace.read_text())["otherData"]["instances"] == {"one": {"pid": 1, "units": 4}}
    assert "Units per lane" in picture.read_text()
    assert "instance one: 2 steps and blocks" in capsys.readouterr().out


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", "http://127.0.0.1:1"]) == 2
    assert "--out FILE, --picture FILE" in capsys.readouterr().err
    with served(lambda query: (404, b"")) as url:
        assert cli.main(["timeline", url, "--out", str(tmp_path / "t.json")]) == 2
    assert "has no /debug/timeline" in capsys.readouterr().err
    with served(told()) as url:
        assert cli.main(["timeline", url, "--out", str(tmp_path / "nowhere" / "t.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
