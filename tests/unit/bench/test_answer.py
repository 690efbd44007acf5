"""What the bytes of a streamed answer are taken for."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.load.answer import SURPLUS, Answer, BrokenAnswerError, spread
from pdmux_ray.bench.load.sse import LIMIT_BYTES, EventParser, OversizeError
from pdmux_ray.metrics.lifeline import Ending, Lifeline

STREAM = (
    b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\nid: 7\n\ndata: one\ndata: two\n\n'
    b"data: caf\xc3\xa9\r\rdata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"one\ntwo", "café".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_network_cuts_them(cuts: list[int]) -> None:
    parser, events, edges = EventParser(), [], [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(edges):
        events += parser.feed(STREAM[begin:end])
    assert events + parser.end() == EVENTS


def test_a_last_event_without_its_line_end_still_counts() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n\ndata: [DONE]") == [b"1"]
    assert parser.end() == [b"[DONE]"]


def test_an_endless_line_and_an_endless_event_are_given_up() -> None:
    with pytest.raises(OversizeError):
        EventParser().feed(b"data: " + b"x" * LIMIT_BYTES)
    lines, half = EventParser(), b"data: " + b"x" * (LIMIT_BYTES // 2) + b"\n"
    lines.feed(half)
    with pytest.raises(OversizeError):
        lines.feed(half)


def chunk(text: str, counted: int | None = None, finish: str | None = None) -> bytes:
    usage = {} if counted is None else {"usage": {"prompt_tokens": 3, "completion_tokens": counted}}
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage}).encode()


def final_usage(tokens: int, prompt: int = 3) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}).encode()


def answered(*events: bytes, asked: int | None = None, prompt: int = 3, strict: bool = True) -> Lifeline:
    """One event a second, from second 1 on."""
    lifeline = Lifeline(0.0, 0.0, prompt_tokens=prompt, asked_tokens=asked)
    answer = Answer(lifeline, strict)
    for second, event in enumerate(events, 1):
        answer.take(float(second), event)
    answer.end(99.0)
    return lifeline


def test_tokens_of_a_chunk_are_counted_by_its_usage() -> None:
    lifeline = answered(
        chunk("", 0), chunk("a", 1), chunk("bcd", 4), chunk("", 5, "length"), final_usage(5), b"[DONE]", asked=5
    )
    assert lifeline.token_s.tolist() == [2, 3, 3, 3, 4]
    assert (lifeline.ending, lifeline.finish_reason, lifeline.error, lifeline.ended_s) == (Ending.COMPLETE, "length", None, 99)


def test_without_usage_in_each_chunk_the_total_is_spread_by_the_length_of_the_texts() -> None:
    lifeline = answered(chunk("a"), chunk("bb bb bb"), chunk(""), chunk("c", finish="stop"), final_usage(7), b"[DONE]")
    assert lifeline.token_s.tolist() == [1, 2, 2, 2, 2, 2, 4]
    assert lifeline.ending is Ending.COMPLETE


@given(st.integers(0, 300), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_spreading_loses_no_token_and_gives_each_arrival_one_while_there_are_enough(tokens: int, lengths: list[int]) -> None:
    counts = spread(tokens, lengths)
    assert sum(counts) == tokens
    assert len(counts) == len(lengths)
    assert min(counts) >= (1 if tokens >= len(lengths) else 0)


def test_without_any_usage_an_answer_that_ended_for_its_length_has_what_was_asked() -> None:
    lifeline = answered(chunk("ab"), chunk("cd", finish="length"), b"[DONE]", asked=4)
    assert lifeline.token_s.tolist() == [1, 1, 2, 2]
    assert lifeline.ending is Ending.COMPLETE
    assert lifeline.error == "the server states no usage"


def test_thinking_aloud_counts_as_text() -> None:
    delta: dict[str, Any] = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}]}
    assert answered(json.dumps(delta).encode(), final_usage(1), b"[DONE]").token_s.tolist() == [1]


def test_fewer_tokens_than_asked_are_a_truncation_unless_an_end_token_was_allowed() -> None:
    events = (chunk("a", 1), chunk("", 1, "stop"), final_usage(1), b"[DONE]")
    assert answered(*events, asked=2).ending is Ending.TRUNCATED
    assert answered(*events, asked=2, strict=False).ending is Ending.COMPLETE
    cut = (chunk("a", 1), chunk("", 1, "length"), final_usage(1), b"[DONE]")
    assert answered(*cut, asked=2, strict=False).ending is Ending.TRUNCATED


def test_an_answer_without_a_token_is_not_complete() -> None:
    assert answered(chunk("", 0, "stop"), final_usage(0), b"[DONE]", strict=False).ending is Ending.TRUNCATED


def test_an_answer_without_a_finish_reason_is_an_error() -> None:
    assert answered(chunk("a", 1), final_usage(1), b"[DONE]").error == "[DONE] without a finish reason"
    cut = answered(chunk("a", 1))
    assert cut.ending is Ending.ERROR
    assert "cut off" in str(cut.error)
    assert cut.token_s.tolist() == [1]


def test_a_missing_done_is_noted_and_leaves_the_answer_complete() -> None:
    lifeline = answered(chunk("a", 1, "stop"), final_usage(1))
    assert (lifeline.ending, lifeline.error) == (Ending.COMPLETE, "the stream ended without [DONE]")


def test_counts_that_do_not_agree_are_noted() -> None:
    events = (chunk("a", 1), chunk("b", 2, "stop"), final_usage(3, prompt=9), b"[DONE]")
    told = answered(*events, asked=1).error
    assert told == ("usage states 3 tokens, 2 came; 2 tokens came, 1 were asked for; usage states 9 prompt tokens, 3 were sent")
    assert answered(*events, prompt=0).prompt_tokens == 9


def test_a_count_that_falls_and_rises_again_counts_no_token_twice() -> None:
    lifeline = answered(chunk("a", 900), chunk("b", 0), chunk("c", 900, "length"), final_usage(900), b"[DONE]", asked=900)
    assert lifeline.token_s.tolist() == [1] * 900


@pytest.mark.parametrize("counted", [None, 1 + SURPLUS])
def test_far_more_tokens_than_were_asked_for_are_no_answer(counted: int | None) -> None:
    events = [chunk("a", counted)] * (SURPLUS + 1)
    with pytest.raises(BrokenAnswerError, match="more than"):
        answered(*events, asked=0)


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices": [{"text": "a", "finish_reason": NaN}]}',
        b'{"choices": [{"text": "a", "finish_reason": ["length"]}]}',
        b'{"choices": [], "usage": {"completion_tokens": true}}',
    ],
)
def test_what_json_allows_and_no_file_of_results_could_hold_is_no_answer(event: bytes) -> None:
    with pytest.raises(BrokenAnswerError, match="no part of an answer"):
        answered(event)


@pytest.mark.parametrize(
    "event",
    [
        b'{"error": {"message": "out of memory"}}',
        b'{"error": "out of memory"}',
        b'{"object": "error", "message": "out of memory"}',
        b"out of memory",
        b'["out of memory"]',
        b'{"choices": [{"text": 5}], "out of memory": 0}',
        b'{"choices": [{"text": "a"}], "usage": {"out of memory": 1}}',
        b'{"choices": [{"text": "out of memory"}], "usage": {"completion_tokens": 1000000000000}}',
        b'{"choices": [{"text": "out of memory"}], "usage": {"completion_tokens": 1, "prompt_tokens": "2"}}',
        b'"out of memory"' + b"[" * 100_000,
    ],
)
def test_what_is_no_part_of_an_answer_is_quoted(event: bytes) -> None:
    lifeline = Lifeline(0.0)
    with pytest.raises(BrokenAnswerError, match="out of memory"):
        Answer(lifeline, True).take(1.0, event)
    assert math.isnan(lifeline.ended_s)
