from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdmux_ray.errors import DeadlineError, InstanceUnavailableError, PdmuxError
from pdmux_ray.serve import answer as answers
from pdmux_ray.serve import mailbox as mailboxes
from pdmux_ray.serve.answer import Answer
from pdmux_ray.serve.generation import Choice, UsageAsked
from pdmux_ray.serve.mailbox import Mailbox, UnreadAnswerError
from pdmux_ray.serve.replies import ChatReply
from pdmux_ray.serve.sse import EventStream
from tests.unit.serve.fakes import Letters, LetterText, metrics


class Desk:
    """An answer of n choices, and its engine requests on an instance that takes them at once: what has been told to end."""

    def __init__(self, choices: int = 1, timeout_s: float = 60.0) -> None:
        self.left: list[str] = []
        self.metrics = metrics()
        self.mailbox = Mailbox(self.leave_all)
        self._running = set(range(choices))
        self.answer = Answer(
            "chat",
            [Choice(index, LetterText(), 3, first_of_prompt=index == 0) for index in range(choices)],
            self,
            arrived_s=time.monotonic(),
            timeout_s=timeout_s,
            metrics=self.metrics,
        )
        self.take, self.fail, self.lost = self.mailbox.take, self.mailbox.fail, self.mailbox.fail

    async def start(self, deadline_s: float) -> None:
        pass

    def ended(self, index: int) -> None:
        self._running.discard(index)

    def leave(self, index: int) -> None:
        if index in self._running:
            self._running.remove(index)
            self.left.append(f"r{index}")

    def leave_all(self) -> None:
        for index in list(self._running):
            self.leave(index)

    async def started(self) -> Answer:
        await self.answer.start()
        return self.answer

    def say(self, index: int, text: str, finish: str | None = None) -> None:
        """Events of a choice, one per character; the last one carries `finish`."""
        for position, char in enumerate(text):
            last = finish is not None and position == len(text) - 1
            event: Sequence[Any] = (f"r{index}", ord(char), None, finish, None, None) if last else (f"r{index}", ord(char))
            self.mailbox.put(index, event)

    async def event_stream(self) -> EventStream:
        """One token has come; nothing is sent yet."""
        answer = await self.started()
        self.say(0, "a")
        reply = ChatReply("id", "m", 1, stream=True, usage_asked=False, names=Letters())
        chunks = answer.chunks(reply, await answer.next(), UsageAsked.NONE)
        return EventStream(chunks, answer.close, answer.cut_s)

    async def stream(self, usage_asked: UsageAsked = UsageAsked.LAST) -> list[Any]:
        """Every event of the stream, as JSON or the closing word."""
        answer = await self.started()
        reply = ChatReply("id", "m", 1, stream=True, usage_asked=True, names=Letters())
        raw = b"".join([chunk async for chunk in answer.chunks(reply, await answer.next(), usage_asked)])
        events = [line[6:] for line in raw.decode().split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]


def texts(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


async def test_a_stream_ends_with_its_reason_its_usage_and_done() -> None:
    desk = Desk()
    desk.say(0, "abc", finish="length")
    events = await desk.stream()
    assert texts(events) == "abc"
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": None,
    }
    assert events[-1] == "[DONE]"
    assert desk.left == []


def counts(events: list[Any]) -> list[tuple[int, int]]:
    """(choice, its tokens so far) of every chunk that has a choice."""
    chunks = [(event["choices"][0], event["usage"]) for event in events[:-1] if event["choices"]]
    for _, usage in chunks:
        assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert usage["prompt_tokens"] == 3
        assert usage["total_tokens"] == 3 + usage["completion_tokens"]
    return [(choice["index"], usage["completion_tokens"]) for choice, usage in chunks]


async def test_every_chunk_counts_the_tokens_so_far_when_that_is_asked_for() -> None:
    desk = Desk()
    desk.say(0, "abc", finish="length")
    events = await desk.stream(UsageAsked.ALL)
    assert counts(events) == [(0, 0), (0, 1), (0, 2), (0, 3)]  # the first one opens, the last one closes
    assert events[-2]["usage"]["completion_tokens"] == 3


async def test_each_choice_counts_its_own_tokens_and_the_last_event_counts_all() -> None:
    desk = Desk(choices=2)
    desk.say(0, "a")
    desk.say(1, "xy", finish="length")
    desk.say(0, "b", finish="length")
    events = await desk.stream(UsageAsked.ALL)
    assert counts(events) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)]
    assert events[-2]["usage"]["completion_tokens"] == 4
    assert events[-2]["usage"]["prompt_tokens"] == 3  # it counts once


async def test_a_token_without_text_is_counted_by_the_next_chunk() -> None:
    desk = Desk()
    desk.say(0, "a?b!")  # "?" is held back, "!" stops
    assert counts(await desk.stream(UsageAsked.ALL)) == [(0, 0), (0, 1), (0, 3), (0, 4)]


async def test_counts_change_nothing_else_in_a_chunk() -> None:
    def without_usage(events: list[Any]) -> list[Any]:
        return [event if event == "[DONE]" else event | {"usage": None} for event in events]

    streams = []
    for asked in (UsageAsked.LAST, UsageAsked.ALL):
        desk = Desk()
        for char in 'a"?':
            desk.mailbox.put(0, ("r0", ord(char), (-0.5, ()), None, None, None))
        desk.say(0, "null}", finish="length")
        streams.append(without_usage(await desk.stream(asked)))
    assert streams[0] == streams[1]


async def test_tokens_that_arrive_together_are_one_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    answer = await desk.started()
    begin_s = time.monotonic()
    monkeypatch.setattr(answers.time, "monotonic", lambda: begin_s + passed_s)
    for text, passed_s in (("ab", 0.4), ("c", 0.5), ("def", 0.8)):
        desk.say(0, text, finish="length" if passed_s == 0.8 else None)
        await answer.next()
    answer.close()
    shown = desk.metrics.exposition().decode()
    assert 'pdmux_time_to_first_token_seconds_count{gateway="gateway"} 1.0' in shown
    assert 'pdmux_inter_token_seconds_count{gateway="gateway"} 2.0' in shown
    assert float(re.findall(r"pdmux_inter_token_seconds_sum\S* (\S+)", shown)[0]) == pytest.approx(0.4)
    assert float(re.findall(r"pdmux_time_to_first_token_seconds_sum\S* (\S+)", shown)[0]) == pytest.approx(0.4, abs=0.1)
    assert float(re.findall(r"pdmux_request_seconds_sum\S* (\S+)", shown)[0]) == pytest.approx(0.8, abs=0.1)


async def test_several_tokens_of_one_message_are_lines_of_their_own_in_one_chunk() -> None:
    desk = Desk()
    answer = await desk.started()
    desk.say(0, "ab")
    reply = ChatReply("id", "m", 1, stream=True, usage_asked=False, names=Letters())
    chunks = answer.chunks(reply, await answer.next(), UsageAsked.NONE)
    assert (await anext(chunks)).count(b"data: ") == 3  # the role, "a", "b"
    await chunks.aclose()
    assert desk.left == ["r0"]


async def test_a_stop_string_ends_the_choice_and_its_engine_request_and_is_never_shown() -> None:
    desk = Desk(choices=2)
    desk.say(0, "ab!cd")
    desk.say(1, "xy", finish="stop")
    events = await desk.stream()
    assert texts(events, 0) == "ab"
    assert texts(events, 1) == "x"  # its last token ended it, and is no text
    assert desk.left == ["r0"]
    assert events[-2]["usage"]["completion_tokens"] == 3 + 2


async def test_text_that_was_held_back_comes_with_the_end() -> None:
    desk = Desk()
    desk.say(0, "a?", finish="length")
    assert texts(await desk.stream()) == "a?"


async def test_an_error_after_streaming_began_is_an_event_without_done() -> None:
    desk = Desk()
    desk.say(0, "ab")
    desk.mailbox.fail(InstanceUnavailableError("It went away."))
    events = await desk.stream()
    assert texts(events) == "ab"
    assert events[-1] == {"error": {"message": "It went away.", "type": "server_error", "param": None, "code": "unavailable"}}
    assert desk.left == ["r0"]


async def test_an_engine_error_ends_the_whole_request() -> None:
    desk = Desk(choices=2)
    answer = await desk.started()
    desk.mailbox.put(0, ("r0", None, None, "error", ("IntegrityError", "out of luck"), None))
    with pytest.raises(PdmuxError, match="out of luck"):
        await answer.next()
    answer.close()
    assert desk.left == ["r1"]


async def test_a_deadline_in_the_engine_is_a_deadline_here() -> None:
    desk = Desk()
    answer = await desk.started()
    desk.mailbox.put(0, ("r0", None, None, "error", ("DeadlineError", "after 3 tokens"), None))
    with pytest.raises(DeadlineError, match="after 3 tokens"):
        await answer.next()
    answer.close()


async def test_a_request_that_runs_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.01)
    desk = Desk(timeout_s=0.01)
    answer = await desk.started()
    with pytest.raises(DeadlineError):
        await answer.next()
    answer.close()
    assert desk.left == ["r0"]


async def test_a_submit_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    async def hangs(deadline_s: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(desk, "start", hangs)
    with pytest.raises(DeadlineError, match="within 60 s"):
        await desk.started()
    desk.answer.close()
    assert 'outcome="failed"} 1.0' in desk.metrics.exposition().decode()


async def test_closing_again_counts_nothing_twice() -> None:
    desk = Desk()
    answer = await desk.started()
    answer.close()
    answer.close()
    assert desk.left == ["r0"]
    assert 'pdmux_open_requests{gateway="gateway"} 0.0' in desk.metrics.exposition().decode()


async def test_a_client_that_leaves_before_the_stream_has_begun_ends_its_engine_request() -> None:
    desk = Desk()
    stream = await desk.event_stream()

    async def never(message: Any = None) -> Any:
        raise AssertionError("nothing is sent or received")

    sending = asyncio.create_task(stream({}, never, never))
    asyncio.get_running_loop().call_soon(sending.cancel)  # after it has made the sending task, before that one runs
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert desk.left == ["r0"]
    assert 'pdmux_open_requests{gateway="gateway"} 0.0' in desk.metrics.exposition().decode()


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.02)
    desk = Desk(timeout_s=0.02)
    stream = await desk.event_stream()

    async def blocked(message: Any) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await stream({}, blocked, blocked)  # type: ignore[arg-type]
    assert desk.left == ["r0"]


async def test_an_answer_that_nobody_reads_fails_and_ends_its_engine_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "MAX_BACKLOG", 5)
    desk = Desk()
    answer = await desk.started()
    desk.say(0, "abcde")
    assert desk.left == []
    desk.say(0, "fgh")
    assert desk.left == ["r0"]
    with pytest.raises(UnreadAnswerError, match="Read it as it comes"):
        await answer.next()
    answer.close()


async def test_a_backlog_is_handled_in_portions_between_which_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "MAX_TAKEN", 2)
    desk = Desk()
    answer = await desk.started()
    desk.say(0, "abcde")
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "other")
    assert [update.text for update in await answer.next()] == ["a", "b"]
    assert turns == ["other"]
    assert [update.text for update in await answer.next()] == ["c", "d"]
    assert [update.text for update in await answer.next()] == ["e"]
    answer.close()


@pytest.mark.parametrize("large", [True, False])
async def test_a_large_answer_with_logprobs_is_written_in_a_thread(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "INLINE_LOGPROBS", 1 if large else 2)
    threads: list[threading.Thread] = []

    class Noting(Letters):
        def token_text(self, token_id: int) -> str:
            threads.append(threading.current_thread())
            return super().token_text(token_id)

    desk = Desk()
    answer = await desk.started()
    desk.mailbox.put(0, ("r0", 97, (-0.5, ((98, -1.0),)), "length", None, None))
    reply = ChatReply("id", "m", 1, stream=False, usage_asked=False, names=Noting())
    written = json.loads(await answer.whole(reply, await answer.next()))
    answer.close()
    assert written["choices"][0]["message"]["content"] == "a"
    assert (threading.current_thread() in threads) is not large


async def test_a_cancelled_stream_ends_its_engine_requests() -> None:
    desk = Desk(choices=2)
    task = asyncio.create_task(desk.stream())
    await asyncio.sleep(0)
    desk.say(0, "a")
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(desk.left) == ["r0", "r1"]
    assert 'outcome="disconnected"} 1.0' in desk.metrics.exposition().decode()


async def test_logprobs_come_with_the_text_they_belong_to() -> None:
    desk = Desk()
    answer = await desk.started()
    for char in "a?b":  # "?" is held back until "b"
        desk.mailbox.put(0, ("r0", ord(char), (-0.5, ()), None, None, None))
    updates = await answer.next()
    assert [(update.text, [token for token, _, _, _ in update.logprobs]) for update in updates] == [
        ("a", [97]),
        ("", []),
        ("?b", [63, 98]),
    ]
    answer.close()


async def test_a_token_begins_where_the_text_before_it_ends_shown_or_not() -> None:
    desk = Desk()
    answer = await desk.started()
    for char in "a?bc":
        desk.mailbox.put(0, ("r0", ord(char), (-0.5, ()), None, None, None))
    assert [offset for update in await answer.next() for _, _, _, offset in update.logprobs] == [0, 1, 2, 3]
    answer.close()


async def test_an_impossible_token_has_a_log_probability_that_json_can_carry() -> None:
    desk = Desk()
    answer = await desk.started()
    desk.mailbox.put(0, ("r0", 97, (float("-inf"), ((98, float("-inf")),)), "length", None, None))
    assert [update.logprobs for update in await answer.next()] == [[(97, -9999.0, ((98, -9999.0),), 0)]]
    answer.close()
