"""Running totals of one engine since it started; metrics read them at scrape time, from any thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdmux_ray.policy.decisions import StepReason
from pdmux_ray.types import FinishReason

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True)
class Counters:
    """Only the step loop writes."""

    steps: int = 0
    steps_by_reason: dict[StepReason, int] = field(default_factory=lambda: dict.fromkeys(StepReason, 0))
    preemptions: int = 0
    prefill_tokens: int = 0  # computed by prefill slices, recomputation after preemptions included
    prefix_hit_tokens: int = 0  # not computed because the prefix cache had them
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    finish_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def retry_after_s(self, waiting: int, now: float) -> float:
        """How long until those who wait now have started, if requests go on finishing as fast as lately; within 1 to 60 s."""
        times = self.finish_times_s
        if len(times) < 2:
            return _MIN_RETRY_S
        per_s = len(times) / max(now - times[0], 1e-3)
        return min(max(waiting / per_s, _MIN_RETRY_S), _MAX_RETRY_S)
