"""What happened to one request, token by token, and what follows from it. The same record and the same functions serve the
gateway's metrics, the load generator and the simulator, so that the word TTFT means one thing.

Pure: no clock, no I/O. Times are seconds on one clock of the owner's choice.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Ending(Enum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    ERROR = "error"  # refused, failed, or cut off without a finish reason
    TRUNCATED = "truncated"  # said to be complete, with fewer tokens than were asked for, or with none
    UNFINISHED = "unfinished"  # its client stopped waiting


@dataclass(slots=True)
class Lifeline:
    """One request. Owner: whoever sends it.

    TTFT and end to end count from `due_s`, so that a client that is late cannot hide a server that is slow.
    """

    due_s: float  # when its arrival was planned
    sent_s: float = math.nan  # when its first byte was sent; not before due_s
    token_s: array[float] = field(default_factory=lambda: array("d"))  # when each output token arrived, one entry a token
    ended_s: float = math.nan  # when its end was known, whatever it was
    ending: Ending = Ending.UNFINISHED
    finish_reason: str | None = None
    error: str | None = None  # what the server or the connection said
    prompt_tokens: int = 0
    asked_tokens: int | None = None  # output tokens that it was to have; None: the model decides

    def tokens_arrived(self, now_s: float, count: int = 1) -> float | None:
        """Notes `count` ≥ 1 tokens, never before those that it knows; its owner gives all tokens of one read the same time.

        Returns the ITL that they end. None at the first tokens, and for those that came with the ones before.
        """
        token_s = self.token_s
        gap_s = now_s - token_s[-1] if token_s else 0.0
        if count == 1:
            token_s.append(now_s)
        else:
            token_s.extend([now_s] * count)
        return gap_s if gap_s > 0 else None

    def tokens_came(self, token_s: array[float]) -> None:
        """Notes a token at each of these times, ascending, none before those that it knows."""
        self.token_s.extend(token_s)

    def complete(self, now_s: float, finish_reason: str) -> None:
        """Notes that the server says it is done, once all its tokens are noted."""
        self.ended_s = now_s
        self.finish_reason = finish_reason
        self.ending = Ending.TRUNCATED if self.truncated else Ending.COMPLETE

    def fail(self, now_s: float, error: str) -> None:
        """Notes a refusal, a failure, or an end without a finish reason. What has arrived stays noted."""
        self.ended_s = now_s
        self.error = error
        self.ending = Ending.ERROR

    @property
    def truncated(self) -> bool:
        """Whether an answer that ended now would lack tokens. One without any always does: it has nothing to be timed."""
        return len(self.token_s) < (1 if self.asked_tokens is None else max(1, self.asked_tokens))

    @property
    def ttft_s(self) -> float | None:
        """From `due_s` to the first token. None before there is one."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def gaps_s(self) -> list[float]:
        """ITL: the gaps between arrivals of tokens, in order. Tokens that arrive together are one arrival: a server that holds
        tokens back and sends many at once has long gaps, and no zeros that would hide them in a percentile."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False) if after > before]

    @property
    def tpot_s(self) -> float | None:
        """(last token − first token) / (tokens − 1), whatever arrived together. None with fewer than two tokens."""
        tokens = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """From `due_s` to the last token of a complete request, else None."""
        return self.token_s[-1] - self.due_s if self.token_s and self.ending is Ending.COMPLETE else None


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of at least one value in ascending order; 0 ≤ q ≤ 1. Between two values it is interpolated linearly: numpy's default, and
    definition 7 of Hyndman and Fan (1996)."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
