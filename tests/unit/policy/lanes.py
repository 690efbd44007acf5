"""A device with lanes as plain data, for planners: one view, or a closed world that carries plans out and checks each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdmux_ray.policy.decisions import Chunk, LaneUse, StepPlan
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import Piece, RequestView
from pdmux_ray.types import Mode, Split

PAGE = 16
LAYERS = 30


def disjoint(units: int) -> list[Split]:
    return [Split(units - decode, decode) for decode in range(1, units)]


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(eq=False)
class Asked:
    """A request."""

    request_id: str
    known_tokens: int
    arrival: int = 0
    computed_tokens: int = 0
    held_pages: int = 0
    ttft_deadline_s: float = math.inf
    left: int = 1  # tokens to generate
    pinned: bool = False
    prefix_key: bytes | None = None
    token_s: float = math.inf  # just now
    deadline_s: float | None = None
    host_sampled: bool = False
    stops_early: bool = False

    @property
    def left_tokens(self) -> int:
        return self.left


@dataclass(frozen=True)
class HitSeen:
    tokens: int = 0
    evictable_pages: int = 0


@dataclass(eq=False)
class Begun:
    """A job."""

    job_id: int
    requests: list[Asked]
    pieces: list[Piece]
    layers_done: int = 0
    in_flight: bool = False
    overtaken: int = 0
    ends_s: float | None = None


@dataclass
class Lanes:
    """A view."""

    units: int = 2
    layers: int = LAYERS
    now: float = 0.0
    free_pages: int = 10_000
    decoding: list[Asked] = field(default_factory=list)
    prefilling: list[Asked] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)
    transferring: Sequence[Asked] = ()
    jobs: list[Begun] = field(default_factory=list)
    hits: dict[str, HitSeen] = field(default_factory=dict)
    split: Split = field(default_factory=lambda: Split(0, 0))
    mode: Mode = Mode.TIME_SHARED
    mode_since_s: float = -math.inf
    page_size: int = PAGE

    @property
    def splits(self) -> Sequence[Split]:
        return disjoint(self.units)

    def prefix_hit(self, request: RequestView) -> HitSeen:
        return self.hits.get(request.request_id, HitSeen())

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        return sum(request.held_pages for request in requests)

    @property
    def holders(self) -> list[Asked]:
        return [*self.decoding, *self.prefilling]

    @property
    def held(self) -> Begun | None:
        return next((job for job in self.jobs if job.in_flight), None)


def decoder(name: str, known: int = 100, arrival: int = 0) -> Asked:
    return Asked(name, known, arrival, known - 1, pages_of(known))


def waiter(name: str, tokens: int, due_s: float = math.inf, arrival: int = 100) -> Asked:
    return Asked(name, tokens, arrival, ttft_deadline_s=due_s)


def begun(job_id: int, *requests: Asked, done: int = 0, in_flight: bool = False, overtaken: int = 0) -> Begun:
    for request in requests:
        request.held_pages = pages_of(request.known_tokens)
    pieces = [Piece(r.known_tokens - r.computed_tokens, r.computed_tokens) for r in requests]
    return Begun(job_id, list(requests), pieces, done, in_flight, overtaken)


def with_jobs(view: Lanes, *jobs: Begun) -> Lanes:
    view.jobs = list(jobs)
    view.prefilling += [request for job in jobs for request in job.requests]
    return view


def check(view: Lanes, plan: StepPlan) -> None:
    """Fails unless the plan can be carried out."""
    seen = {request.request_id: request for request in [*view.holders, *view.waiting]}
    preempted = [seen[name] for name in plan.preempt]
    written = view.held.requests if view.held else []
    assert not any(request in written for request in preempted), "pages that are being written are given up"
    assert all(request in view.holders for request in preempted)
    dropped = [job for job in view.jobs if any(request in preempted for request in job.requests)]
    decodes = [seen[name] for name in plan.decode]
    assert all(request in view.decoding and request not in preempted for request in decodes)
    block = plan.lanes.block if plan.lanes else None
    chunks = [*plan.prefill, *(block.chunks if block else ())]
    _check_pages(view, decodes, preempted, [seen[chunk.request_id] for chunk in chunks], plan.steps)
    assert plan.steps == 1 or _ends_before_the_block(view, plan), "a burst that a prefill waits for"
    assert plan.steps == 1 or all(request.left >= plan.steps and not request.host_sampled for request in decodes)
    computed = [request for job in view.jobs if job not in dropped for request in job.requests]
    for chunk in chunks:
        request = seen[chunk.request_id]
        start = request.computed_tokens if request.held_pages else view.prefix_hit(request).tokens
        assert request not in view.decoding
        assert request not in preempted
        assert request not in computed
        assert chunk.start == start
        assert 1 <= chunk.tokens <= request.known_tokens - start
    assert len({chunk.request_id for chunk in chunks}) == len(chunks)
    if plan.lanes is not None:
        _check_use(view, plan, plan.lanes, dropped)


def _ends_before_the_block(view: Lanes, plan: StepPlan) -> bool:
    """Also when there is none."""
    use = plan.lanes
    if use is None or not (use.block or view.held):
        return not plan.prefill
    ends_s = view.now + use.block_s.predicted_s if use.block_s else view.held.ends_s if view.held else None
    if ends_s is None or use.decode_s is None:
        return False
    return use.mode is not Mode.TIME_SHARED and plan.steps * use.decode_s.predicted_s <= ends_s - view.now + 1e-9


def _check_pages(view: Lanes, decodes: list[Asked], preempted: list[Asked], begin: list[Asked], steps: int) -> None:
    pages = sum(max(pages_of(request.known_tokens + steps - 1) - request.held_pages, 0) for request in decodes)
    for request in begin:
        if not request.held_pages:
            hit = view.prefix_hit(request)
            pages += pages_of(request.known_tokens) - hit.tokens // PAGE + hit.evictable_pages
    assert pages <= view.free_pages + view.pages_freed(preempted), "more pages than there are"


def _check_use(view: Lanes, plan: StepPlan, use: LaneUse, dropped: list[Begun]) -> None:
    split, block, held = use.split, use.block, view.held
    assert not plan.prefill, "two kinds of prefill in a step"
    assert 0 <= split.prefill_units <= view.units
    assert 0 <= split.decode_units <= view.units
    if use.mode is Mode.SPLIT:
        assert split.prefill_units + split.decode_units <= view.units
    if plan.decode:
        assert split.decode_units
        if held is not None:
            assert use.mode is not Mode.TIME_SHARED, "a decode beside a block that has every unit"
            assert use.mode is Mode.CAPPED or view.split.prefill_units + split.decode_units <= view.units
    if held is not None:
        assert block is None, "the lane is busy"
        assert split.prefill_units == view.split.prefill_units, "the block keeps its units"
    if block is not None:
        job = next((job for job in view.jobs if job.job_id == block.job_id), None)
        assert job not in dropped or job is None
        assert (job is None) is (block.job_id is None) is bool(block.chunks)
        assert (job.layers_done if job else 0) < block.end_layer <= view.layers
        assert split.prefill_units
        known = {request.request_id: request.known_tokens for request in [*view.prefilling, *view.waiting]}
        assert all(chunk.start + chunk.tokens == known[chunk.request_id] for chunk in block.chunks)


class World(Lanes):
    """Carries plans out on a made-up clock until everyone has all tokens."""

    def __init__(self, costs: FakeCosts, arrivals: Sequence[tuple[float, Asked]], pages: int) -> None:
        super().__init__(units=costs.units, free_pages=pages)
        self.costs = costs
        self.coming = sorted(arrivals, key=lambda arrival: arrival[0])
        self.done: list[str] = []
        self.first_token_s: dict[str, float] = {}
        self.gaps_s: list[float] = []
        self.most_overtaken = 0
        self.plans: list[StepPlan] = []
        self._block_ends_s, self._end_layer = 0.0, 0
        self._jobs_begun = 0

    def run(self, plan_step: Callable[[Lanes], StepPlan], most_steps: int = 20_000) -> None:
        while self.coming or self.waiting or self.holders:
            assert len(self.plans) < most_steps, "somebody never ends"
            if not (self.waiting or self.holders):
                self.now = max(self.now, self.coming[0][0])
            while self.coming and self.coming[0][0] <= self.now:
                self.waiting.append(self.coming.pop(0)[1])
            plan = plan_step(self)
            check(self, plan)
            self.plans.append(plan)
            self.carry_out(plan)

    def carry_out(self, plan: StepPlan) -> None:
        for name in plan.preempt:
            self._preempt(self._find(name))
        use = plan.lanes
        mode = use.mode if use else Mode.CHUNKED
        if mode is not self.mode:
            self.mode, self.mode_since_s = mode, self.now
        self.split = use.split if use else Split(self.units, self.units)
        decodes = [self._find(name) for name in plan.decode]
        for request in decodes:
            self._hold(request, max(pages_of(request.known_tokens + plan.steps - 1) - request.held_pages, 0))
        for left in reversed(range(plan.steps)):
            began_s = self.now
            told_s = self._one_pass(plan.prefill, decodes) if use is None else self._lanes(use, decodes, left)
            use = use and replace(use, block=None)
            for request in decodes:
                self._token(request, told_s)
            self.gaps_s += [self.now - began_s] * bool(decodes)
            assert self.now > began_s, "nothing happens"

    def _lanes(self, use: LaneUse, decodes: list[Asked], left: int) -> float:
        """When the decodes have their tokens. `left`: steps of the burst after this one."""
        at_once = use.mode is not Mode.TIME_SHARED
        if use.block is not None and at_once:
            self._launch(use)
        if decodes:
            beside = self.split.prefill_units if self.held else 0
            context = sum(request.known_tokens for request in decodes)
            self.now += self.costs.decode(len(decodes), context, use.split.decode_units, beside).predicted_s
        told_s = self.now
        if use.block is not None and not at_once:
            self._launch(use)
        if self.held and not left and (not decodes or not at_once or self._block_ends_s <= self.now + use.wait_s):
            self.now = max(self.now, self._block_ends_s)
            self._land()
        return told_s

    def _launch(self, use: LaneUse) -> None:
        block = use.block
        assert block is not None
        if block.job_id is None:
            for older in self.jobs:
                older.overtaken += 1
                self.most_overtaken = max(self.most_overtaken, older.overtaken)
            requests = [self._start(chunk) for chunk in block.chunks]
            self._jobs_begun += 1
            self.jobs.append(begun(self._jobs_begun, *requests))
        job = next(job for job in self.jobs if job.job_id == (block.job_id or self._jobs_begun))
        beside = use.split.decode_units if use.mode is not Mode.TIME_SHARED else 0
        layers, self._end_layer, job.in_flight = block.end_layer - job.layers_done, block.end_layer, True
        last = block.end_layer == self.layers
        block_s = self.costs.prefill(job.pieces, layers, use.split.prefill_units, beside, last).predicted_s
        self._block_ends_s = job.ends_s = self.now + block_s

    def _land(self) -> None:
        job = self.held
        assert job is not None
        job.in_flight, job.layers_done, job.ends_s = False, self._end_layer, None
        if job.layers_done == self.layers:
            self.jobs.remove(job)
            for request in job.requests:
                self._prefilled(request)

    def _one_pass(self, chunks: Sequence[Chunk], decodes: list[Asked]) -> float:
        """When the decodes have their tokens."""
        pieces = [Piece(chunk.tokens, chunk.start) for chunk in chunks]
        context = sum(request.known_tokens for request in decodes)
        self.now += self.costs.mixed(len(decodes), context, pieces, self.units).predicted_s
        for chunk in chunks:
            request = self._start(chunk)
            request.computed_tokens += chunk.tokens
            if request.computed_tokens == request.known_tokens:
                self._prefilled(request)
        return self.now

    def _start(self, chunk: Chunk) -> Asked:
        request = self._find(chunk.request_id)
        if request in self.waiting:
            self.waiting.remove(request)
            self._hold(request, pages_of(request.known_tokens))
            self._put(request, self.prefilling)
        return request

    def _prefilled(self, request: Asked) -> None:
        self.prefilling.remove(request)
        request.ttft_deadline_s = math.inf
        self.first_token_s.setdefault(request.request_id, self.now)
        self._put(request, self.decoding)
        self._token(request, self.now)

    def _token(self, request: Asked, told_s: float) -> None:
        request.token_s = told_s
        request.computed_tokens = request.known_tokens
        request.known_tokens += 1
        request.left -= 1
        if request.left <= 0:
            self.decoding.remove(request)
            self._hold(request, -request.held_pages)
            self.done.append(request.request_id)

    def _preempt(self, request: Asked) -> None:
        self.jobs = [job for job in self.jobs if request not in job.requests]
        (self.decoding if request in self.decoding else self.prefilling).remove(request)
        self._hold(request, -request.held_pages)
        request.computed_tokens = 0
        self._put(request, self.waiting)

    def _hold(self, request: Asked, pages: int) -> None:
        request.held_pages += pages
        self.free_pages -= pages
        assert self.free_pages >= 0

    def _put(self, request: Asked, queue: list[Asked]) -> None:
        queue.append(request)
        queue.sort(key=lambda other: other.arrival)

    def _find(self, name: str) -> Asked:
        return next(request for request in [*self.holders, *self.waiting] if request.request_id == name)
