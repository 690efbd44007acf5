"""Every way to be refused, and that nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.ray.conftest import CONTEXT, STEP_S, VOCABULARY, App
from tests.ray.test_operation import wait_until
from tests.ray.test_scrapes import of, total

pytestmark = pytest.mark.ray

OK = {"model": "demo", "prompt": "hi", "max_tokens": 2}
AT_INSTANCES = ("pdmux_instance_running_requests", "pdmux_instance_waiting_requests")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

# (what, path, body as JSON or bytes, status, param)
REFUSED: list[tuple[str, str, Any, int, str | None]] = [
    ("malformed", "completions", b'{"model": "demo", "prompt": ', 400, None),
    ("no_object", "completions", b"[1, 2]", 400, None),
    ("invalid_utf8", "completions", b'{"model": "\xff"}', 400, None),
    ("lone_surrogate", "completions", b'{"model": "demo", "prompt": "\\ud800"}', 400, "prompt"),
    ("surrogate_model", "completions", b'{"model": "\\ud800", "prompt": "x"}', 404, "model"),
    ("wrong_type", "completions", OK | {"max_tokens": "5"}, 400, "max_tokens"),
    (
        "nested",
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": 5}]},
        400,
        "messages[0].content",
    ),
    ("missing", "completions", {"model": "demo"}, 400, "prompt"),
    ("out_of_range", "completions", OK | {"top_p": 1.5}, 400, "top_p"),
    ("not_a_number", "completions", b'{"model": "demo", "prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("unknown_field", "completions", OK | {"temprature": 1}, 400, "temprature"),
    ("unsupported", "completions", OK | {"echo": True}, 400, "echo"),
    ("unknown_model", "completions", OK | {"model": "other"}, 404, "model"),
    ("empty_prompt", "completions", OK | {"prompt": ""}, 400, "prompt"),
    ("empty_ids", "completions", OK | {"prompt": []}, 400, "prompt"),
    ("id_outside", "completions", OK | {"prompt": [1, VOCABULARY]}, 400, "prompt"),
    ("id_negative", "completions", OK | {"prompt": [-1]}, 400, "prompt"),
    ("one_of_many", "completions", OK | {"prompt": [[1] * 30, [2] * 30, [VOCABULARY]], "max_tokens": 400}, 400, "prompt"),
    ("too_many", "completions", OK | {"prompt": ["x"] * 9, "n": 2}, 400, "n"),
    ("too_long", "completions", OK | {"prompt": [1] * CONTEXT}, 400, "prompt"),
    ("too_long_chat", "chat/completions", CHAT | {"messages": [{"role": "user", "content": "word " * CONTEXT}]}, 400, "prompt"),
    ("too_large", "completions", OK | {"prompt": "x" * 300_000}, 413, None),
]


@pytest.fixture(scope="module")
def steady(served: str) -> Iterator[list[float]]:
    """A stream that runs beside the tests of this module: when each of its tokens came."""
    arrivals: list[float] = []
    stop = threading.Event()

    def read() -> None:
        body = OK | {"max_tokens": CONTEXT - 50, "stream": True, "ignore_eos": True}
        while not stop.is_set():
            with httpx.stream("POST", f"{served}/v1/completions", json=body, timeout=30) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        assert '"error"' not in line
                        arrivals.append(time.monotonic())
                    if stop.is_set():
                        return

    reader = threading.Thread(target=read)
    reader.start()
    yield arrivals
    stop.set()
    reader.join()


@pytest.mark.parametrize(("path", "body", "status", "param"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_wrong_request_is_refused_in_openais_shape(
    served: str, steady: list[float], path: str, body: Any, status: int, param: str | None
) -> None:
    before = len(steady)
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = httpx.post(f"{served}/v1/{path}", timeout=30, **content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(error["message"]) > 10
    end_s = time.monotonic() + 500 * STEP_S
    while len(steady) <= before:  # the stream beside it goes on
        assert time.monotonic() < end_s
        time.sleep(STEP_S)


def test_a_prompt_over_the_context_states_both_numbers(served: str) -> None:
    response = httpx.post(f"{served}/v1/completions", json=OK | {"prompt": [1] * 600}, timeout=30)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "600" in response.json()["error"]["message"]
    assert str(CONTEXT) in response.json()["error"]["message"]


def test_a_body_without_a_length_is_cut_off_at_the_limit(served: str) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(2000):
            sent += 100_000
            yield b" " * 100_000

    try:
        response = httpx.post(f"{served}/v1/completions", content=endless(), timeout=30)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the server hung up while the body was still being sent, which is as good
    assert sent < 200_000_000


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/completions", 405)])
def test_paths_and_methods_are_refused_in_openais_shape(served: str, method: str, path: str, status: int) -> None:
    response = httpx.request(method, served + path, timeout=30)
    assert response.status_code == status
    assert response.json()["error"]["message"].endswith(path)


def test_a_full_queue_is_429_with_retry_after_and_the_others_finish(keyed: App) -> None:
    headers = {"authorization": "Bearer first-key"}
    body = OK | {"max_tokens": 300, "ignore_eos": True}  # longer than it takes a busy machine to send all
    results: list[httpx.Response] = []

    def ask() -> None:
        results.append(httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(12)]  # two instances, each runs one and lets two wait
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(response.status_code for response in results)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert set(statuses) == {200, 429}
    refused = next(response for response in results if response.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"


def test_prompts_of_one_request_are_accepted_together_or_not_at_all(keyed: App) -> None:
    headers = {"authorization": "Bearer first-key"}

    def ask(prompts: list[str], tokens: int) -> httpx.Response:
        body = OK | {"prompt": prompts, "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=60)

    def metric(name: str) -> float:
        return keyed.metric(name, key="first-key")

    def generated() -> float:
        """By the instances themselves: the front has what came with their last heartbeats."""
        return sum(total(found, "pdmux_engine_generated_tokens_total") for found in of(keyed, "instance").values())

    before = generated()
    threads = [threading.Thread(target=ask, args=(["x"], 300)) for _ in range(4)]
    for sent, thread in enumerate(threads, 1):  # to where fewer are: in the end each instance has one more that waits
        thread.start()
        wait_until(lambda sent=sent: sum(map(metric, AT_INSTANCES)) == sent, 30)  # type: ignore[misc]
    assert ask(["a", "b"], 300).status_code == 429
    for thread in threads:
        thread.join()
    assert ask(["c"], 2).status_code == 200
    wait_until(lambda: not keyed.busy("first-key"), 30)
    assert generated() == before + 4 * 300 + 2  # nothing of "a" and "b" was computed


def test_more_prompts_than_may_ever_wait_are_refused_for_good(keyed: App) -> None:
    body = OK | {"prompt": ["a", "b", "c"]}
    headers = {"authorization": "Bearer first-key"}
    response = httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 400
    assert "engine.max_waiting" in response.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "wrong-key", "first-key,", "first"])
def test_a_wrong_key_is_401(keyed: App, key: str) -> None:
    for path in ("/v1/models", "/metrics"):
        response = httpx.get(keyed.url + path, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=30)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_every_configured_key_is_good_and_health_needs_none(keyed: App) -> None:
    for key in ("first-key", "second-key"):
        assert [model.id for model in keyed.openai(key).models.list()] == ["demo"]
    assert httpx.get(f"{keyed.url}/health", timeout=30).status_code == 200
    assert httpx.get(f"{keyed.url}/version", timeout=30).status_code == 200
