"""What the events of one streamed answer mean: its tokens, when they came, how it ended. Knows nothing of sockets.

Tokens of an event are counted exactly when every event says how many there are so far (`usage` with `completion_tokens`).
Otherwise an event with text is one arrival, and at the end the tokens that the last usage states are spread over the arrivals
in proportion to the length of their texts. Without any usage an answer that ended for its length has the tokens that were
asked, and another one a token for each arrival.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pdmux_ray.metrics.lifeline import Ending, Lifeline

MAX_PROMPT_TOKENS = 1 << 24  # that are believed
SURPLUS = 10_000  # tokens beyond those that were asked for; an answer with more is broken
QUOTE = 300  # characters of what a server said


class BrokenAnswerError(Exception):
    """The server failed, or sent what is no answer; the message is for the report."""


class Answer:
    """Feeds a lifeline with the events of its answer. Owner of the lifeline's tokens and ending while the answer comes.

    `strict_length`: end tokens were to be ignored, so an answer that stops early is truncated, whatever its finish reason.
    """

    __slots__ = ("_arrivals_s", "_counted", "_lengths", "_lifeline", "_most", "_strict_length", "_usage", "done", "exact")

    def __init__(self, lifeline: Lifeline, strict_length: bool) -> None:
        self._lifeline = lifeline
        self._strict_length = strict_length
        self._most = (lifeline.asked_tokens or 0) + SURPLUS
        self._arrivals_s = array("d")
        self._lengths: list[int] = []  # characters of each arrival
        self._counted = 0  # tokens so far, by usage
        self._usage: Mapping[str, Any] | None = None  # the last
        self.exact = True
        self.done = False  # [DONE] came

    def take(self, now_s: float, event: bytes) -> None:
        """Raises BrokenAnswerError."""
        if event == b"[DONE]":
            self.done = True
            return
        try:
            document = json.loads(event)
            if document.get("error") or document.get("object") == "error":
                raise BrokenAnswerError(f"error event: {_message(document)}")
            usage, choices = document.get("usage"), document.get("choices") or ()
            text = ""
            for choice in choices:
                text += _text(choice)
                self._lifeline.finish_reason = _finish_reason(choice) or self._lifeline.finish_reason
            if usage:
                self._usage = usage
                _check_counts(usage)
                self._bound(usage["completion_tokens"])
            if choices:
                self._arrived(now_s, len(text), usage["completion_tokens"] if usage else None)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenAnswerError(f"an event that is no part of an answer ({error!r}): {quoted(event)}") from None

    def _arrived(self, now_s: float, length: int, counted: int | None) -> None:
        if counted is None:
            if not length:
                return
            self.exact, tokens = False, 1
        else:
            tokens = counted - self._counted
            if tokens <= 0:
                return
            self._counted = counted
        self._arrivals_s.append(now_s)
        self._lengths.append(length)
        self._lifeline.tokens_arrived(now_s, tokens)
        self._bound(len(self._lifeline.token_s))

    def _bound(self, tokens: int) -> None:
        """Raises BrokenAnswerError: an answer without end must not fill the memory."""
        if tokens > self._most:
            asked = self._lifeline.asked_tokens
            raise BrokenAnswerError(f"more than {self._most} tokens, {'no number' if asked is None else asked} asked for")

    def end(self, now_s: float) -> None:
        """The stream ended by itself. Decides what that means."""
        lifeline, reason = self._lifeline, self._lifeline.finish_reason
        stated = self._usage["completion_tokens"] if self._usage else None
        if not self.exact:
            self._spread(lifeline.asked_tokens if stated is None and reason == "length" else stated)
        self._check(stated)
        if reason is None:
            what = "[DONE] without a finish reason" if self.done else "the stream was cut off: no finish reason, no [DONE]"
            lifeline.fail(now_s, what)
            return
        lifeline.complete(now_s, reason)
        if lifeline.ending is Ending.TRUNCATED and reason == "stop" and lifeline.token_s and not self._strict_length:
            lifeline.ending = Ending.COMPLETE
        if not self.done:
            self._note("the stream ended without [DONE]")

    def _spread(self, stated: int | None) -> None:
        counts = spread(len(self._lengths) if stated is None else stated, self._lengths)
        self._lifeline.token_s = array("d", [at for at, n in zip(self._arrivals_s, counts, strict=True) for _ in range(n)])

    def _check(self, stated: int | None) -> None:
        """The server's counts against each other, and against what was sent and asked."""
        lifeline, came = self._lifeline, len(self._lifeline.token_s)
        if stated is None:
            self._note("the server states no usage")
        elif stated != came:
            self._note(f"usage states {stated} tokens, {came} came")
        if lifeline.asked_tokens is not None and came > lifeline.asked_tokens:
            self._note(f"{came} tokens came, {lifeline.asked_tokens} were asked for")
        prompt = self._usage.get("prompt_tokens") if self._usage else None
        if prompt is not None and lifeline.prompt_tokens and prompt != lifeline.prompt_tokens:
            self._note(f"usage states {prompt} prompt tokens, {lifeline.prompt_tokens} were sent")
        lifeline.prompt_tokens = lifeline.prompt_tokens or prompt or 0

    def _note(self, text: str) -> None:
        self._lifeline.error = f"{self._lifeline.error}; {text}" if self._lifeline.error else text


def spread(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Tokens of each arrival: at least one while there are enough, the rest in proportion to the lengths; in sum `tokens`, if
    there is any arrival."""
    arrivals = len(lengths)
    if not arrivals:
        return []
    if tokens <= arrivals:
        return [1] * tokens + [0] * (arrivals - tokens)
    weights = lengths if any(lengths) else [1] * arrivals
    more, total = tokens - arrivals, sum(weights)
    upto = [round(more * reached / total) for reached in accumulate(weights)]
    return [1 + after - before for before, after in zip([0, *upto], upto, strict=False)]


def _check_counts(usage: Mapping[str, Any]) -> None:
    """Raises ValueError when they can be no counts of tokens."""
    for count in (usage["completion_tokens"], usage.get("prompt_tokens", 0)):
        if type(count) is not int or not 0 <= count <= MAX_PROMPT_TOKENS:
            raise ValueError(f"{count!r} tokens")


def _text(choice: Mapping[str, Any]) -> str:
    """What the choice of an event says, aloud or to itself."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


def _finish_reason(choice: Mapping[str, Any]) -> str | None:
    """Raises ValueError when it is no text."""
    reason = choice.get("finish_reason")
    if not isinstance(reason, str | None):
        raise ValueError("a finish reason that is no text")
    return reason and reason[:QUOTE]


def _message(document: Mapping[str, Any]) -> str:
    error = document.get("error") or document
    return str(error.get("message", error) if isinstance(error, dict) else error)[:QUOTE]


def quoted(data: bytes) -> str:
    """The beginning of what a server sent, as one line."""
    return " ".join(data[:QUOTE].decode(errors="replace").split())
