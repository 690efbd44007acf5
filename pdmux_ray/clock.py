"""The engine's clock: engine and policies read no other, and policies not even this one (`now` is an argument)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time (`time.monotonic`)."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """Simulated time: `sleep` advances it at once."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self._now_s += seconds

    def move_to(self, now_s: float) -> None:
        """Exactly, which a sum of sleeps need not be. Raises ValueError for a time that has passed."""
        if now_s < self._now_s:
            raise ValueError(f"it is {self._now_s} s: time does not go back to {now_s} s")
        self._now_s = now_s
