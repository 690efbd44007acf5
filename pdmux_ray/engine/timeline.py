"""What the step loop did: lately, in a bounded ring of records, for traces and pictures; and how long steps took, in all.

timeline = Timeline(units, mode)
timeline.arrived(at_s, request_id, prompt_tokens)           a request was taken in
timeline.step(plan, begin_s, end_s, waiting)                its decodes, or the whole of a one-pass step, from launch to collect
timeline.steps(plan, begin_s, ends_s, estimates, waiting)   several of one plan, each from the end of the one before
timeline.block(use, job_id, first_layer, tokens, begin_s, end_s)      a block of a prefill, from launch to its own end
timeline.ended(at_s, request_id, how, generated_tokens)     its last event

Owner: the step loop's thread, the only one that adds; `since` is for any thread. A record is a tuple of plain values: it costs
one append, and keeps nothing of the engine's alive. Times are seconds on the engine's clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple, TypeAlias

from pdmux_ray.histogram import Histogram
from pdmux_ray.policy.decisions import LaneUse, StepPlan
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import ONE_PASS_MODES, Mode

KEPT = 32_768  # records: minutes of steps of 20 ms, about 10 MB
LATEST = 256  # estimates that a guard factor is of
PAGE = 1_024  # records that `since` answers at most: written as JSON in about 3 ms, for which the instance's rest waits


class Arrival(NamedTuple):
    """A request was taken in."""

    kind: str
    number: int  # of the record; ascending, without gaps
    at_s: float
    request_id: str
    prompt_tokens: int


class Step(NamedTuple):
    """Decodes, or the one pass of a step without lanes."""

    kind: str
    number: int
    begin_s: float  # launch; amid a burst the collect before
    end_s: float  # collect
    reason: str  # a StepReason
    mode: str
    why: str | None  # a ModeReason; None when there was no choice
    prefill_units: int  # of the split; without lanes both have all units
    decode_units: int
    decodes: int  # requests
    prefill_tokens: int  # computed in the same pass
    waiting: int  # requests
    predicted_s: float | None  # of the decodes, or of the one pass
    bound_s: float | None
    steps: int = 1  # of the burst that it is one of
    burst: str | None = None  # a BurstReason; None when there was no choice
    wait_s: float = 0.0  # that it might wait, after the decodes, for a block that was due by then


class PrefillBlock(NamedTuple):
    """Layers of one job."""

    kind: str
    number: int
    begin_s: float
    end_s: float
    mode: str
    why: str
    prefill_units: int
    decode_units: int
    job_id: int
    first_layer: int
    end_layer: int
    tokens: int  # computed in each layer
    predicted_s: float | None
    bound_s: float | None


class Ended(NamedTuple):
    """A request's last event."""

    kind: str
    number: int
    at_s: float
    request_id: str
    how: str  # a FinishReason
    generated_tokens: int


Record: TypeAlias = Arrival | Step | PrefillBlock | Ended

_KINDS: dict[str, type[Record]] = {"arrival": Arrival, "step": Step, "block": PrefillBlock, "ended": Ended}


def unpack(packed: list[Any]) -> Record:
    """A record that has been JSON."""
    return _KINDS[packed[0]](*packed)


STEP_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
STEP_KINDS = ("decode", "prefill", "mixed")  # decodes alone; a block of a prefill; both in one pass


class StepTimes:
    """How long work took since the start, and was predicted to take, by its kind. Owner: the step loop's thread, which pays for
    two observations a step; any may read."""

    def __init__(self) -> None:
        self.took = {kind: Histogram(STEP_BUCKETS_S) for kind in STEP_KINDS}
        self.predicted = {kind: Histogram(STEP_BUCKETS_S) for kind in STEP_KINDS}

    def note(self, kind: str, took_s: float, predicted_s: float | None) -> None:
        self.took[kind].observe(took_s)
        if predicted_s is not None:
            self.predicted[kind].observe(predicted_s)


class Timeline:
    """`units`: of the device. `mode`: the configured one, which a step without lanes has."""

    def __init__(self, units: int, mode: Mode, kept: int = KEPT) -> None:
        self.units = units
        self.times = StepTimes()
        self._one_pass = (mode if mode in ONE_PASS_MODES else Mode.CHUNKED).value
        self._records: deque[Record] = deque(maxlen=kept)
        self._estimates: deque[Estimate] = deque(maxlen=LATEST)  # of the latest steps and blocks that were predicted
        self._numbers = count()

    def arrived(self, at_s: float, request_id: str, prompt_tokens: int) -> None:
        self._records.append(Arrival("arrival", next(self._numbers), at_s, request_id, prompt_tokens))

    def step(self, plan: StepPlan, begin_s: float, end_s: float, waiting: int) -> None:
        self.steps(plan, begin_s, (end_s,), (plan.lanes.decode_s if plan.lanes else plan.step_s,), waiting)

    def steps(
        self, plan: StepPlan, begin_s: float, ends_s: Sequence[float], estimates: Sequence[Estimate | None], waiting: int
    ) -> None:
        """`estimates`: of each, aligned with `ends_s`; the plan's own says nothing here."""
        use = plan.lanes
        why = use.why if use else plan.why
        kind = "mixed" if plan.prefill else "decode"
        about = (
            plan.reason.value,
            use.mode.value if use else self._one_pass,
            why.value if why else None,
            use.split.prefill_units if use else self.units,
            use.split.decode_units if use else self.units,
            len(plan.decode),
            sum([chunk.tokens for chunk in plan.prefill]),
            waiting,
        )
        after = (plan.steps, plan.burst.value if plan.burst else None, use.wait_s if use else 0.0)
        note, append, numbers = self.times.note, self._records.append, self._numbers
        for end_s, estimate in zip(ends_s, estimates, strict=True):
            predicted_s, bound_s = estimate or (None, None)
            note(kind, end_s - begin_s, predicted_s)
            if estimate is not None:
                self._estimates.append(estimate)
            append(Step("step", next(numbers), begin_s, end_s, *about, predicted_s, bound_s, *after))
            begin_s = end_s

    def block(self, use: LaneUse, job_id: int, first_layer: int, tokens: int, begin_s: float, end_s: float) -> None:
        """`use`: of the step that launched it; it has a block. `tokens`: of the job, which each layer computes."""
        assert use.block is not None
        predicted_s, bound_s = use.block_s or (None, None)
        self.times.note("prefill", end_s - begin_s, predicted_s)
        if use.block_s is not None:
            self._estimates.append(use.block_s)
        self._records.append(
            PrefillBlock(
                "block",
                next(self._numbers),
                begin_s,
                end_s,
                use.mode.value,
                use.why.value,
                use.split.prefill_units,
                use.split.decode_units,
                job_id,
                first_layer,
                use.block.end_layer,
                tokens,
                predicted_s,
                bound_s,
            )
        )

    def ended(self, at_s: float, request_id: str, how: str, generated_tokens: int) -> None:
        self._records.append(Ended("ended", next(self._numbers), at_s, request_id, how, generated_tokens))

    def guard_factor(self) -> float | None:
        """Bounds over predictions of the latest steps and blocks; None when none was predicted. From any thread."""
        latest = tuple(self._estimates)  # at once: the step loop may append
        predicted_s = sum([estimate.predicted_s for estimate in latest])
        return sum([estimate.bound_s for estimate in latest]) / predicted_s if predicted_s else None

    def since(self, number: int, begin_s: float = -inf, most: int = PAGE) -> list[Record]:
        """The oldest records that are still there, from `number` and about `begin_s` on, at most so many. From any thread."""
        records = tuple(self._records)  # at once: the step loop may append
        first = bisect_left(records, number, key=lambda record: record.number)
        first = bisect_left(records, begin_s, first, key=lambda record: record[2])  # a block began before what is around it
        return list(records[first : first + most])
