"""The two directions of an instance's link, each with a bandwidth of its own: which write has which when. Pure.

Writes are served in the order in which they are posted. A write moves at the full bandwidth whenever neither its sender's way
out nor its receiver's way in has been given to an earlier one. So no more passes through either than bandwidth times time,
writes of one pair end in their order, and a way that a write leaves unused, as the other end is taken, is the next one's. What
has been given is not taken back: a write that is cancelled, or whose end freezes or dies, has had its time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from operator import itemgetter

_START = itemgetter(0)


class Pipe:
    """One direction. Owner: its transport. Seconds of one clock, which is asked no earlier than before."""

    def __init__(self) -> None:
        self._given: list[tuple[float, float]] = []  # (start, end): ascending, with time between them

    def free(self, at: float) -> tuple[float, float]:
        """The first time from `at` on that nobody has been given: its start, and its end."""
        index = bisect_right(self._given, at, key=_START)
        start = max(at, self._given[index - 1][1]) if index else at
        return start, self._given[index][0] if index < len(self._given) else math.inf

    def give(self, start: float, end: float) -> None:
        """A time that is free."""
        index = bisect_left(self._given, start, key=_START)
        if index < len(self._given) and self._given[index][0] == end:
            end = self._given.pop(index)[1]
        if index and self._given[index - 1][1] == start:
            index -= 1
            start = self._given.pop(index)[0]
        self._given.insert(index, (start, end))

    def forget(self, now: float) -> None:
        """What is over."""
        while self._given and self._given[0][1] <= now:
            del self._given[0]


def carry(out: Pipe, into: Pipe, now: float, seconds: float) -> tuple[float, float]:
    """Gives a write that is posted now, and takes so long alone, its time. When half of it has moved, and when all of it."""
    half_s, left_s, at = math.inf, seconds, now
    for pipe in (out, into):
        pipe.forget(now)
    while True:
        start, until = _free(out, into, at)
        moved_s = seconds - left_s
        end = min(start + left_s, until)
        if half_s == math.inf and moved_s + (end - start) >= seconds / 2:
            half_s = start + (seconds / 2 - moved_s)
        if start < end:
            out.give(start, end)
            into.give(start, end)
        if start + left_s <= until:
            return min(half_s, end), end
        left_s -= end - start
        at = end


def _free(out: Pipe, into: Pipe, at: float) -> tuple[float, float]:
    """The first time from `at` on that both are."""
    while True:
        start, until = out.free(at)
        at, there_until = into.free(start)
        if at == start:
            return start, min(until, there_until)
