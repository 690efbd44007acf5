"""Measures the work of a design on a `LaneRunner`, as an engine sees it: from launch to collect, host work and all.

What the pages hold does not change how long a step takes, so contexts are not computed first; requests stand still: a decode
step computes the same position again, which keeps its context what the record says.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import LaneRunner, PrefillSlice, StepBatch
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.design import Point
from pdmux_ray.latency.records import Kind, Record
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import SamplingParams, Split

FEWEST_TOKEN_IDS = 64  # any vocabulary has these
WARM_UP = 2  # times of each point that do not count
SIZING = 3  # blocks of a co-run by which the size of the others is set
BLOCK_STEPS = 1.3  # decode steps that a block of a co-run should last
FULL_SHARE = 0.85  # a time counts as beside the other lane when that was busy for so much of it

_PARAMS = SamplingParams(temperature=0.0, max_tokens=2**31 - 1)


@dataclass
class StillSequence:
    """A `SequenceView` of random tokens that never grows."""

    request_id: str
    tokens: Sequence[int]
    pages: Sequence[int]
    params: SamplingParams = _PARAMS
    stop_ids: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)


class _Span(NamedTuple):
    """When a lane was busy, and with which work of its."""

    begin_s: float
    end_s: float
    layers: int = 0  # of a block
    last: bool = False

    def beside(self, others: Sequence[_Span]) -> bool:
        """Whether the other lane, whose spans follow one another, was busy for (nearly) all of it."""
        busy_s = 0.0
        for at in range(bisect_right(others, self.begin_s, key=_END), len(others)):
            other = others[at]
            if other.begin_s >= self.end_s:
                break
            busy_s += min(self.end_s, other.end_s) - max(self.begin_s, other.begin_s)
        return busy_s >= FULL_SHARE * (self.end_s - self.begin_s)


_END = attrgetter("end_s")


class PointBench:
    """Owner: the profiler, on the thread that runs steps. Leaves the runner without jobs, also when a measurement fails."""

    def __init__(self, runner: LaneRunner, clock: Clock, seed: int = 0) -> None:
        self._runner, self._clock = runner, clock
        self._rng = random.Random(seed)
        self._names = count()
        self._jobs = count()
        self._next_page = 0

    def measure(self, point: Point) -> list[Record]:
        """The point's records: one, or one for each size of block that ran. Raises ConfigError when the pool is too small."""
        self._next_page = 0
        contexts = [self._sequence(tokens) for tokens in point.contexts]
        slices = [self._slice(piece) for piece in point.pieces]
        if point.kind == "mixed":
            times_s = self._repeat(lambda: self._step_s(StepBatch(contexts, slices), None), point.repeats)
            return [self._record(point, "mixed", self._runner.units, 0, times_s)]
        assert point.split is not None
        split = point.split
        if not slices:
            times_s = self._repeat(lambda: self._step_s(StepBatch(contexts, []), split), point.repeats)
            return [self._record(point, "decode", split.decode_units, 0, times_s)]
        if not contexts:
            return self._blocks(point, slices, split)
        return self._together(point, contexts, slices, split)

    def switch_s(self, split: Split, repeats: int = 40) -> float:
        """What a decode step costs more after one on other units, by medians; 0 when nothing shows."""
        self._next_page = 0
        batch, whole = StepBatch([self._sequence(64)], []), Split(0, self._runner.units)
        steady = self._repeat(lambda: self._step_s(batch, split), repeats)
        changed: list[float] = []
        for _ in range(repeats):
            self._step_s(batch, whole)
            changed.append(self._step_s(batch, split))
        return max(sorted(changed)[repeats // 2] - sorted(steady)[repeats // 2], 0.0)

    def _repeat(self, measure: Callable[[], float], repeats: int) -> list[float]:
        for _ in range(WARM_UP):
            measure()
        return [measure() for _ in range(repeats)]

    def _step_s(self, batch: StepBatch, split: Split | None) -> float:
        begin_s = self._clock.now()
        self._runner.launch(batch, split=split)
        self._runner.collect()
        return self._clock.now() - begin_s

    def _blocks(self, point: Point, slices: Sequence[PrefillSlice], split: Split) -> list[Record]:
        """Blocks of one size, and the rest of a prefill where that is short: the last one brings the output head."""
        layers = self._runner.layers
        self._block_s(slices, [1], split)
        size = max(1, min(layers, round(point.block_s / self._block_s(slices, [1], split)[0][1])))
        count = min(point.blocks, layers) or max(1, round(layers / size))
        if whole := bool(point.blocks) or count <= 4:
            size = -(-layers // count)
        times: dict[tuple[int, bool], list[float]] = {}
        while sum(map(len, times.values())) < point.repeats:
            ends = list(range(size, layers, size))[: 2 if not whole else layers]
            for took, seconds, last in self._block_s(slices, [*ends, *([layers] if whole else [])], split):
                times.setdefault((took, last), []).append(seconds)
        return [self._record(point, "prefill", split.prefill_units, 0, t, *key) for key, t in times.items()]

    def _block_s(self, slices: Sequence[PrefillSlice], ends: Sequence[int], split: Split) -> list[tuple[int, float, bool]]:
        """(layers, seconds, last) of each block of a job that runs up to these layers."""
        job, done, found = next(self._jobs), 0, []
        self._runner.open_job(job, slices)
        for end in ends:
            self._runner.launch_block(job, end, split)
            self._runner.collect_block()  # which need not wait for the block
            found.append((end - done, self._runner.block_s, end == self._runner.layers))
            done = end
        if done < self._runner.layers:
            self._runner.drop_job(job)
        return found

    def _together(
        self, point: Point, contexts: Sequence[StillSequence], slices: Sequence[PrefillSlice], split: Split
    ) -> list[Record]:
        """Decode steps one after the other, with block after block beside them, as the engine's loop launches them."""
        runner, now = self._runner, self._clock.now
        loop = _BlockLoop(runner, slices, split, self._jobs, now)
        steps: list[_Span] = []
        try:
            while len(steps) < WARM_UP + 4 * point.repeats and not loop.enough(steps, point.repeats):
                begin_s = now()
                loop.launch()
                runner.launch(StepBatch(contexts, []), split=split)
                runner.collect()
                steps.append(_Span(begin_s, now()))
                loop.collect(steps[-1])
        finally:
            loop.end()
        found: list[Record] = []
        if full := [s.end_s - s.begin_s for s in steps[WARM_UP:] if s.beside(loop.spans)]:
            found.append(self._record(point, "decode", split.decode_units, split.prefill_units, full))
        times: dict[tuple[int, bool], list[float]] = {}
        for span in loop.spans:
            if span.beside(steps):
                times.setdefault((span.layers, span.last), []).append(span.end_s - span.begin_s)
        return found + [
            self._record(point, "prefill", split.prefill_units, split.decode_units, t, *key) for key, t in times.items()
        ]

    def _record(
        self, point: Point, kind: Kind, units: int, beside: int, times_s: Sequence[float], layers: int = 0, last: bool = False
    ) -> Record:
        with_decode, with_prefill = kind != "prefill", kind != "decode"
        return Record(
            *(kind, point.role, units, beside),
            len(point.contexts) if with_decode else 0,
            sum(point.contexts) if with_decode else 0,
            point.pieces if with_prefill else (),
            *(layers, last, tuple(times_s)),
        )

    def _sequence(self, tokens: int) -> StillSequence:
        pages = -(-tokens // self._runner.page_size)
        first, self._next_page = self._next_page, self._next_page + pages
        if self._next_page > self._runner.pages:
            raise ConfigError(f"the KV pool has {self._runner.pages} pages, too few to measure with: raise kv_cache_gib")
        ids = [drawn % FEWEST_TOKEN_IDS for drawn in self._rng.randbytes(tokens)]
        return StillSequence(f"profile-{next(self._names)}", ids, range(first, self._next_page))

    def _slice(self, piece: Piece) -> PrefillSlice:
        return PrefillSlice(self._sequence(sum(piece)), piece.prior_tokens, piece.new_tokens, sample=True)


class _BlockLoop:
    """Keeps the prefill lane busy with jobs of the same slices. A block lasts a little longer than a decode step."""

    def __init__(
        self,
        runner: LaneRunner,
        slices: Sequence[PrefillSlice],
        split: Split,
        jobs: Iterator[int],
        now: Callable[[], float],
    ) -> None:
        self._runner, self._slices, self._split, self._jobs, self._now = runner, slices, split, jobs, now
        self._size = max(1, runner.layers // 8)
        self._job: int | None = None
        self._done = 0
        self._flight: tuple[float, int] | None = None  # when it was launched, and its last layer
        self.spans: list[_Span] = []

    def enough(self, steps: Sequence[_Span], repeats: int) -> bool:
        busy = [*self.spans, *([_Span(self._flight[0], math.inf)] if self._flight else [])]
        return sum(step.beside(busy) for step in steps[WARM_UP:]) >= repeats and len(self.spans) > SIZING

    def launch(self) -> None:
        """Unless a block is in flight."""
        if self._flight:
            return
        if self._job is None:
            self._job, self._done = next(self._jobs), 0
            self._runner.open_job(self._job, self._slices)
        end = min(self._done + self._size, self._runner.layers)
        self._flight = self._now(), end
        self._runner.launch_block(self._job, end, self._split)

    def collect(self, step: _Span) -> None:
        """The block in flight, if it has ended."""
        if self._flight and self._runner.block_done():
            self._land()
            if len(self.spans) <= SIZING:
                block = self.spans[-1]
                per_layer_s = (block.end_s - block.begin_s) / block.layers
                size = round(BLOCK_STEPS * (step.end_s - step.begin_s) / max(per_layer_s, 1e-9))
                self._size = max(1, min(size, self._runner.layers))

    def end(self) -> None:
        if self._flight:
            self._land()
        if self._job is not None:
            self._runner.drop_job(self._job)

    def _land(self) -> None:
        assert self._flight is not None
        (begin_s, end), self._flight = self._flight, None
        job, self._job = self._job, None
        self._runner.collect_block()
        last = end == self._runner.layers
        self.spans.append(_Span(begin_s, begin_s + self._runner.block_s, end - self._done, last))
        if not last:
            self._job, self._done = job, end
