"""Decode steps of an instance that are alike: known ahead, taken in at once, and cut short by whatever comes.

    begin_s --step--> ends_s[0] --step--> ends_s[1] ...        taken: so many of them the engine has taken in

Nothing happens at their ends. Who wants to know what the instance would have said there, asks: so the engine may be behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmux_ray.policy.batching import pages_to_grow
from pdmux_ray.types import Load


class Lengths(NamedTuple):
    """Of a request, before the first step."""

    known_tokens: int
    held_pages: int


@dataclass(eq=False, slots=True)
class Streak:
    """Owner: its instance. Times in the world's seconds."""

    requests: Sequence[str]  # who decodes
    lengths: Sequence[Lengths]  # aligned
    page_size: int
    begin_s: float
    ends_s: list[float]  # of the steps; each begins when the one before ends
    before: Load  # figures, before the first step
    taken: int = 0
    after: Load | None = None  # figures when the last step has ended
    looks_s: list[float] = field(default_factory=list)  # when figures were due that nobody asked for yet, amid steps

    @property
    def end_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else self.begin_s

    def begin_of(self, step: int) -> float:
        return self.ends_s[step - 1] if step else self.begin_s

    def begun_before(self, now: float) -> int:
        """How many steps."""
        return min(bisect_left(self.ends_s, now) + 1, len(self.ends_s)) if self.begin_s < now else 0

    def heard_before(self, now: float, line_s: float) -> int:
        """Of how many steps the end was known before, at the other end of a line that takes `line_s`."""
        return bisect_left(self.ends_s, now, key=lambda end_s: end_s + line_s)

    def newest(self, now: float, line_s: float) -> tuple[Load, float] | None:
        """The newest figures that were known before `now` at the other end of a line, and when they left."""
        steps, looks = self.heard_before(now, line_s), bisect_left(self.looks_s, now, key=lambda look_s: look_s + line_s)
        if looks and (not steps or self.looks_s[looks - 1] > self.ends_s[steps - 1]):
            return self.look(looks - 1)
        return (self.load_after(steps, self.ends_s[steps - 1]), self.ends_s[steps - 1]) if steps else None

    def look(self, index: int) -> tuple[Load, float]:
        look_s = self.looks_s[index]
        return self.load_after(self.begun_before(look_s), look_s), look_s

    def load_after(self, steps: int, now: float) -> Load:
        """The instance's figures amid or at the end of the last one of so many steps."""
        if self.after is not None and now == self.end_s:
            return self.after
        before = self.before
        return before._replace(
            free_pages=before.free_pages - pages_to_grow(self.lengths, self.page_size, steps),
            steps=before.steps + steps,
            step_age_s=now - self.begin_of(steps - 1),
            decode_context_tokens=before.decode_context_tokens + steps * before.decoding,
        )
