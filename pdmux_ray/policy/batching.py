"""What the next step does: who decodes, who is prefilled, who is preempted. First come, first served; nobody overtakes.

A decode computes its newest known token, at position `known_tokens - 1`, so it needs a new page exactly when
`known_tokens > held_pages * page_size`: at most one page a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdmux_ray.policy.decisions import Chunk, StepPlan, StepReason
from pdmux_ray.policy.views import EngineView, LengthsView, PrefixHit, RequestView
from pdmux_ray.types import Mode


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step may hold; every number is at least 1."""

    mode: Mode
    chunk_tokens: int  # CHUNKED: decodes and prefill tokens of a step together
    max_prefill_tokens: int  # PREFILL_FIRST: of a step with several prompts; the first prompt runs whatever its length
    max_batch: int  # requests that hold pages at once


def plan_step(view: EngineView, limits: BatchLimits) -> StepPlan:
    """Plans one step.

    1. Every decode reserves the page it grows into. Too few: the newest requests that hold pages are preempted, and nobody
       starts.
    2. Prefills that are under way go on, oldest first; then waiting requests start while there are a place in the batch, pages
       for all of their known tokens, and token budget. The first one that cannot start blocks those behind it.
    3. PREFILL_FIRST: decode waits for a step that prefills. CHUNKED: both run.
    """
    decoding, prefilling = view.decoding, view.prefilling
    free_pages = view.free_pages - pages_to_grow(decoding, view.page_size)
    preempted: list[RequestView] = []
    if free_pages < 0:
        preempted = preempt(view, [*decoding, *prefilling])
        decoding = without(decoding, preempted)
        prefilling = without(prefilling, preempted)

    whole = limits.mode is Mode.PREFILL_FIRST
    prefill = _Prefill(whole, limits.max_prefill_tokens if whole else limits.chunk_tokens - len(decoding))
    blocked = prefill.go_on(prefilling)
    if preempted:
        blocked = StepReason.PREEMPT
    elif blocked is None and view.waiting:
        places = limits.max_batch - len(decoding) - len(prefilling) - len(view.transferring)
        blocked = prefill.start(view, Room(view.page_size, free_pages, places))

    chunks = tuple(prefill.chunks)
    decode = () if whole and chunks else tuple([request.request_id for request in decoding])
    return StepPlan(
        reason=_reason(whole, chunks, decode, blocked),
        decode=decode,
        prefill=chunks,
        preempt=tuple([request.request_id for request in preempted]),
    )


class _Prefill:
    """The prefill part of a plan while it is being put together."""

    __slots__ = ("budget_tokens", "chunks", "whole")

    def __init__(self, whole: bool, budget_tokens: int) -> None:
        self.whole = whole
        self.budget_tokens = budget_tokens
        self.chunks: list[Chunk] = []

    def go_on(self, prefilling: Sequence[RequestView]) -> StepReason | None:
        """Adds the next chunks of requests that already hold their pages; answers what stopped it, if anything did."""
        for request in prefilling:
            if not self._add(request, request.computed_tokens):
                return StepReason.DECODE_NO_BUDGET
        return None

    def start(self, view: EngineView, room: Room) -> StepReason | None:
        """Adds waiting requests in order; answers what stopped it, if anything did."""
        for request in view.waiting:
            if room.places <= 0:
                return StepReason.DECODE_BATCH_FULL
            if not self.whole and self.budget_tokens <= 0:
                return StepReason.DECODE_NO_BUDGET
            hit = view.prefix_hit(request)
            blocked = room.take(request, hit)
            if blocked is not None:
                return blocked
            if not self._add(request, hit.tokens):
                return StepReason.DECODE_NO_BUDGET
        return None

    def _add(self, request: RequestView, start: int) -> bool:
        """Adds as much of the request as fits; False when nothing does."""
        tokens = request.known_tokens - start
        if not self.whole:
            tokens = min(tokens, self.budget_tokens)
        elif self.chunks and tokens > self.budget_tokens:
            tokens = 0
        if tokens <= 0:
            return False
        self.chunks.append(Chunk(request.request_id, start, tokens))
        self.budget_tokens -= tokens
        return True


class Room:
    """Pages and places in the batch that are left for requests to start with."""

    __slots__ = ("free_pages", "page_size", "places")

    def __init__(self, page_size: int, free_pages: int, places: int) -> None:
        self.page_size = page_size
        self.free_pages = free_pages
        self.places = places

    def take(self, request: RequestView, hit: PrefixHit) -> StepReason | None:
        """Sets aside what a waiting request needs. Answers why there is not enough of it; then nothing is taken."""
        if self.places <= 0:
            return StepReason.DECODE_BATCH_FULL
        fresh_pages = -(-request.known_tokens // self.page_size) - hit.tokens // self.page_size
        pages = fresh_pages + hit.evictable_pages
        if pages > self.free_pages:
            return StepReason.DECODE_NO_PAGES
        self.free_pages -= pages
        self.places -= 1
        return None


def pages_to_grow(decoding: Sequence[LengthsView], page_size: int, steps: int = 1) -> int:
    """How many pages the next `steps` tokens of all these take."""
    missing = [request.known_tokens + steps - 1 - request.held_pages * page_size for request in decoding]
    return sum([-(-tokens // page_size) for tokens in missing if tokens > 0])


def preempt(view: EngineView, holders: Iterable[RequestView]) -> list[RequestView]:
    """Which of `holders` to preempt, newest arrival first, so that every decode that is left can grow. No pinned ones."""
    page_size = view.page_size
    left = sorted([request for request in holders if not request.pinned], key=lambda request: request.arrival)
    growing = {r.request_id for r in view.decoding if r.known_tokens > r.held_pages * page_size}
    preempted: list[RequestView] = []
    while left and len(growing) > view.free_pages + view.pages_freed(preempted):
        newest = left.pop()
        preempted.append(newest)
        growing.discard(newest.request_id)
    return preempted


def without(requests: Sequence[RequestView], preempted: Sequence[RequestView]) -> list[RequestView]:
    gone = {request.request_id for request in preempted}
    return [request for request in requests if request.request_id not in gone]


def _reason(whole: bool, chunks: tuple[Chunk, ...], decode: tuple[str, ...], blocked: StepReason | None) -> StepReason:
    if not chunks and not decode:
        return StepReason.IDLE
    if not chunks or blocked is StepReason.PREEMPT:
        return blocked or StepReason.DECODE_ONLY
    if whole:
        return StepReason.PREFILL_WHOLE
    return StepReason.CHUNK_MIXED if decode else StepReason.CHUNK_ONLY
