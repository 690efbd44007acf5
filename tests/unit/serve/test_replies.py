from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdmux_ray.serve import replies, sse
from pdmux_ray.serve.generation import Choice
from pdmux_ray.serve.replies import ChatReply, CompletionReply, KeptNames
from tests.unit.serve.fakes import Letters, LetterText

TRICKY = ['"', "\\", "\n\r\t", "\x00", "é", "你好", "🙂", "\u2028", "</script>", " ", "data: [DONE]\n\n"]
ENTRIES = [(97, -0.5, ((97, -0.5), (98, -1.5)), 0), (98, -0.25, (), 1)]


def chat(stream: bool = True, usage_asked: bool = False) -> ChatReply:
    return ChatReply("chatcmpl-1", "m", 7, stream=stream, usage_asked=usage_asked, names=Letters())


def completion() -> CompletionReply:
    return CompletionReply("cmpl-1", "m", 7, stream=True, usage_asked=False, names=Letters())


def read(event: bytes) -> Any:
    """The document of one event; checks its framing."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@pytest.mark.parametrize("text", TRICKY)
def test_a_prebuilt_chunk_carries_any_text_unharmed(text: str) -> None:
    assert read(chat().text(0, text))["choices"][0]["delta"] == {"content": text}
    assert read(completion().text(0, text))["choices"][0]["text"] == text


def test_a_prebuilt_chunk_equals_the_same_chunk_built_in_full() -> None:
    reply = chat()
    expected = read(reply.text_with_logprobs(2, "x", []))
    expected["choices"][0]["logprobs"] = None
    assert read(reply.text(2, "x")) == expected


def test_choices_do_not_mix_up_their_prebuilt_chunks() -> None:
    reply = chat()
    assert [read(reply.text(index, "x"))["choices"][0]["index"] for index in (0, 1, 0)] == [0, 1, 0]


def test_a_chat_stream_opens_with_its_role_and_closes_with_its_reason() -> None:
    reply = chat()
    assert read(reply.opening(0))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    closing = read(reply.closing(0, "", [], "stop"))["choices"][0]
    assert (closing["delta"], closing["finish_reason"]) == ({}, "stop")


def test_usage_is_null_in_every_chunk_but_the_last_when_it_was_asked_for() -> None:
    reply = chat(usage_asked=True)
    assert read(reply.text(0, "x"))["usage"] is None
    last = read(reply.usage({"total_tokens": 3}))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})
    assert "usage" not in read(chat().text(0, "x"))


def test_chat_logprobs_name_token_bytes_and_alternatives() -> None:
    content = read(chat().text_with_logprobs(0, "ab", ENTRIES))["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}],
    }


def test_completion_logprobs_are_four_lists() -> None:
    first = read(completion().text_with_logprobs(0, "ab", ENTRIES))["choices"][0]["logprobs"]
    assert first["tokens"] == ["a", "b"]
    assert first["top_logprobs"] == [{"a": -0.5, "b": -1.5}, {"b": -0.25}]  # always with the chosen token
    assert first["token_logprobs"] == [-0.5, -0.25]
    assert first["text_offset"] == [0, 1]


class Bytes(Letters):
    """A token is a byte."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_completion_logprobs_name_a_part_of_a_character_by_its_bytes() -> None:
    reply = CompletionReply("cmpl-1", "m", 7, stream=True, usage_asked=False, names=Bytes())
    entries = [(byte, -0.5, ((byte, -0.5), (0x9F, -1.5), (0x98, -2.5)), 0) for byte in "a🙂b".encode()]
    logprobs = read(reply.text_with_logprobs(0, "a🙂b", entries))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82", "b"]
    assert logprobs["top_logprobs"][1] == {r"bytes:\xf0": -0.5, r"bytes:\x9f": -1.5, r"bytes:\x98": -2.5}


def test_of_tokens_with_the_same_name_the_best_counts() -> None:
    class Same(Letters):
        def token_bytes(self, token_id: int) -> bytes:
            return b"x"

    reply = CompletionReply("cmpl-1", "m", 7, stream=True, usage_asked=False, names=Same())
    event = reply.text_with_logprobs(0, "x", [(97, -2.5, ((98, -0.5), (99, -1.5)), 0)])
    assert read(event)["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5}]


@pytest.mark.parametrize("make", [ChatReply, CompletionReply])
def test_a_whole_answer_says_what_the_stream_says_however_it_is_sliced(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "SLICE", 1)
    choices = [Choice(index, LetterText(), 3) for index in (0, 1)]
    choices[0].finish, choices[1].finish = "stop", "length"
    reply = make("id", "m", 7, stream=False, usage_asked=False, names=KeptNames(Letters()))
    document = json.loads(reply.whole(choices, ['a"b', "c"], [ENTRIES * 2, []], {"total_tokens": 3}))
    stream = make("id", "m", 7, stream=True, usage_asked=False, names=Letters())
    closing = read(stream.closing(0, 'a"b', ENTRIES * 2, "stop"))["choices"][0]
    assert document["choices"][0]["logprobs"] == closing["logprobs"]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]
    assert document["choices"][1]["logprobs"] is None
    assert (document["usage"], document["model"]) == ({"total_tokens": 3}, "m")


async def test_an_event_stream_sends_every_chunk_in_one_message_and_closes_its_source() -> None:
    closed = []

    async def chunks() -> Any:
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            closed.append(True)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("an event stream reads nothing")

    end_s = asyncio.get_running_loop().time() + 60
    await sse.EventStream(chunks(), lambda: closed.append(True), end_s)({"type": "http"}, receive, send)
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b"data: 2\n\n", b""]
    assert [message.get("more_body") for message in sent] == [None, True, True, False]
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    assert closed == [True, True]  # the generator, then the answer behind it
