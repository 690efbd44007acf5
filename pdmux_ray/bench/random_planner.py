"""A policy that draws: whatever is legal, it does some day. With a seed, so that a schedule can be run again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdmux_ray.policy.batching import pages_to_grow, preempt
from pdmux_ray.policy.decisions import Block, Chunk, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.views import JobView, LanesView, RequestView
from pdmux_ray.types import Mode, Split

MODES = (Mode.TIME_SHARED, Mode.SPLIT, Mode.CAPPED, Mode.CHUNKED)
PREEMPTS = 0.03  # how often somebody is preempted for nothing


class RandomPlanner:
    """Draws mode, split, block, who decodes and how many steps, who starts, who rests and who is preempted, every time anew.

    `modes`: of which it draws. `most_steps`: of a burst. At least one step in two decodes everyone who can, so that every
    schedule ends.
    """

    def __init__(self, seed: int, max_batch: int, modes: Sequence[Mode] = MODES, most_steps: int = 1) -> None:
        self._rng = random.Random(seed)
        self._max_batch = max_batch
        self._modes = modes
        self._most_steps = most_steps

    def __call__(self, view: LanesView) -> StepPlan:
        rng = self._rng
        preempted = self._preempt(view)
        gone = {request.request_id for request in preempted}
        free = view.free_pages + view.pages_freed(preempted)
        decoding = [r for r in view.decoding if r.request_id not in gone]
        if rng.random() < 0.3:
            decoding = [r for r in decoding if rng.random() < 0.7]
        while (need := pages_to_grow(decoding, view.page_size)) > free:
            decoding.pop()
        jobs = [job for job in view.jobs if gone.isdisjoint(r.request_id for r in job.requests)]
        flying = any(job.in_flight for job in jobs)
        chunks = [] if flying else self._chunks(view, gone, free - need)
        use = self._lanes(view, jobs, chunks, flying, bool(decoding))
        decode, prefill = decoding, self._cut(chunks) if use is None else ()
        if not (decode or prefill or flying or (use and use.block)) and view.decoding and not gone:
            decode = list(view.decoding[:1]) if pages_to_grow(view.decoding[:1], view.page_size) <= free else []
        idle = not (decode or prefill or flying or gone or (use and use.block))
        return StepPlan(
            StepReason.IDLE if idle else StepReason.LANES_BOTH,
            tuple(r.request_id for r in decode),
            prefill,
            tuple(r.request_id for r in preempted),
            use,
            steps=1 if chunks or self._most_steps == 1 else self._steps(view, decode, free),
        )

    def _steps(self, view: LanesView, decode: Sequence[RequestView], free: int) -> int:
        if not decode or any(request.host_sampled for request in decode):
            return 1
        steps = self._rng.randint(1, min(self._most_steps, *(request.left_tokens for request in decode)))
        while steps > 1 and pages_to_grow(decode, view.page_size, steps) > free:
            steps -= 1
        return steps

    def _preempt(self, view: LanesView) -> list[RequestView]:
        written = {r.request_id for job in view.jobs if job.in_flight for r in job.requests}
        holders = [r for r in (*view.decoding, *view.prefilling) if not r.pinned and r.request_id not in written]
        if pages_to_grow(view.decoding, view.page_size) > view.free_pages:
            return preempt(view, holders)
        return [self._rng.choice(holders)] if holders and self._rng.random() < PREEMPTS else []

    def _chunks(self, view: LanesView, gone: set[str], free: int) -> list[Chunk]:
        """Whole chunks of up to three requests that no job computes, out of order; of those that wait while there is room."""
        computed = {r.request_id for job in view.jobs for r in job.requests if r.request_id not in gone}
        loose = [r for r in view.prefilling if r.request_id not in gone | computed]
        chunks = [Chunk(r.request_id, r.computed_tokens, r.known_tokens - r.computed_tokens) for r in loose]
        places = self._max_batch - len(view.decoding) - len(view.prefilling) - len(view.transferring)
        for request in () if gone else self._rng.sample(list(view.waiting), len(view.waiting)):
            hit = view.prefix_hit(request)
            pages = -(-request.known_tokens // view.page_size) - hit.tokens // view.page_size + hit.evictable_pages
            if places > 0 and pages <= free:
                places, free = places - 1, free - pages
                chunks.append(Chunk(request.request_id, hit.tokens, request.known_tokens - hit.tokens))
        self._rng.shuffle(chunks)
        return chunks[: self._rng.randint(1, 3)]

    def _lanes(
        self, view: LanesView, jobs: Sequence[JobView], chunks: Sequence[Chunk], flying: bool, decodes: bool
    ) -> LaneUse | None:
        """None: one pass."""
        rng = self._rng
        mode = rng.choice(self._modes)
        if mode is Mode.CHUNKED and (jobs or not (chunks or decodes)):
            mode = rng.choice([mode for mode in self._modes if mode is not Mode.CHUNKED] or [Mode.TIME_SHARED])
        if flying and Mode.CAPPED in self._modes and rng.random() < 0.8:
            mode = Mode.CAPPED  # which waits for no block
        if mode is Mode.CHUNKED:
            return None
        units = view.units
        split = Split(units, units) if mode is Mode.TIME_SHARED else rng.choice(view.splits)
        if mode is Mode.CAPPED:
            split = Split(split.prefill_units, units)
        block = None
        if not flying and (jobs or chunks):
            if jobs and (not chunks or rng.random() < 0.6):
                job = rng.choice(jobs)
                block = Block(job.job_id, (), rng.randint(job.layers_done + 1, view.layers))
            else:
                block = Block(None, tuple(chunks), rng.randint(1, view.layers))
        return LaneUse(mode, split, ModeReason.CONFIGURED, block)  # no reason fits a plan that is drawn

    def _cut(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        return tuple(Chunk(c.request_id, c.start, self._rng.randint(1, c.tokens)) for c in chunks)
