"""Queues, pages and tokens of one instance: carries out plans and takes in results. No threads, no I/O, no clock.

    plan() -> StepPlan    apply(plan) -> StepBatch    commit(batch, output)    take_events()

It is the `EngineView` that `policy.batching.plan_step` reads. Everything here runs in the step loop's thread.
`engine.lanes` has the one for a device with lanes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat

from pdmux_ray.engine.alike import grow
from pdmux_ray.engine.counters import Counters
from pdmux_ray.engine.handoffs import Handoffs
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.pages import Hit, PagePool
from pdmux_ray.engine.queues import Queue
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import PrefillSlice, StepBatch, StepOutput
from pdmux_ray.engine.timeline import Timeline
from pdmux_ray.errors import DeadlineError, IntegrityError, PdmuxError
from pdmux_ray.policy.batching import plan_step
from pdmux_ray.policy.decisions import Chunk, StepPlan, StepReason
from pdmux_ray.policy.look_ahead import NONE_ALIKE, Alike, steps_alike
from pdmux_ray.policy.views import RequestView
from pdmux_ray.types import FinishReason, Phase, TokenEvent, TokenLogprobs


class Scheduler:
    """The live requests of one instance, oldest first: QUEUED in `waiting`, PREFILL in `prefilling`, DECODE in `decoding`,
    TRANSFER in `transferring`."""

    def __init__(self, limits: EngineLimits, pool: PagePool, timeline: Timeline, handoffs: Handoffs) -> None:
        self.pool = pool
        self.timeline = timeline
        self.handoffs = handoffs
        self.max_batch = limits.max_batch
        self.now = 0.0  # when the plan was made
        self.counters = Counters(queued_finishes_s=deque([0.0], maxlen=4 * limits.max_batch))
        self.requests: dict[str, Request] = {}
        self.waiting = Queue()
        self.prefilling = Queue()
        self.decoding = Queue()
        self.transferring = Queue()
        self._batch_limits = limits.batch_limits()
        self._steps_left = 0  # of a burst, that the device still computes
        self._outlived: list[Request] = []  # who ended amid it, and the pages that it may still write into
        self._events: dict[str, list[TokenEvent]] = {}  # by sink
        self._counted_to_s = 0.0  # up to when `counters.queued_s` has counted

    # What a policy sees.

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def free_pages(self) -> int:
        return self.pool.available

    def prefix_hit(self, request: RequestView) -> Hit:
        return self.requests[request.request_id].prefix_hit(self.pool)

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        return self.pool.freed_by(self.requests[request.request_id].pages for request in requests)

    # One step.

    def add(self, request: Request) -> None:
        """Takes in a QUEUED request with a new id, later in arrival than all before."""
        self.requests[request.request_id] = request
        self._wait(request)
        self.timeline.arrived(request.history[0][0], request.request_id, request.prompt_tokens)

    def plan(self, now: float) -> StepPlan:
        """Raises IntegrityError when nothing can run although someone waits, not for a transfer: they would wait for ever."""
        self.now = now
        self.handoffs.begin(self, now)
        plan = self._decide()
        if plan.reason is StepReason.IDLE and self.requests and not self.handoffs.alive:
            raise IntegrityError(f"{len(self.requests)} requests are live, but the plan is to do nothing")
        return plan

    def apply(self, plan: StepPlan, now: float) -> StepBatch:
        """Preempts, starts requests and gives out pages. Raises IntegrityError when the plan does not fit the state."""
        requests = self.requests
        self._counted_to_s = now
        block = plan.lanes.block if plan.lanes else None
        chunks = (*plan.prefill, *block.chunks) if block else plan.prefill
        for request_id in plan.preempt:
            self._preempt(requests[request_id], now)
        # Hits are held before anyone takes a page, so that nobody's new page evicts another's hit.
        started = [self._start(chunk, now) for chunk in chunks if requests[chunk.request_id].phase is Phase.QUEUED]
        page_size, more = self.pool.page_size, plan.steps - 1
        decodes = [requests[request_id] for request_id in plan.decode]
        if more and (plan.prefill or any(request.host_sampled or request.left_tokens <= more for request in decodes)):
            raise IntegrityError(f"{plan} is no burst: it prefills, or somebody is sampled on the host or ends before its end")
        for request in decodes:
            if len(request.tokens) + more > len(request.pages) * page_size:
                request.pages.extend(self.pool.take(-(-(len(request.tokens) + more) // page_size) - len(request.pages)))
        for request in started:
            request.pages.extend(self.pool.take(-(-len(request.tokens) // page_size) - len(request.pages)))
            if request.exported:
                self.handoffs.begin_export(request, self.pool)
        self._count(plan, plan.steps)
        if plan.burst is not None:
            self.counters.bursts_by_reason[plan.burst] += 1
        return StepBatch(decodes, [self._slice(chunk) for chunk in plan.prefill], plan.steps)

    def computing(self, steps_left: int) -> None:
        """Of what the device was given, so many steps are still to come. Pages of who ends meanwhile are free after them."""
        self._steps_left = steps_left
        if not steps_left:
            for request in self._outlived:
                request.give_up_pages(self.pool)
            self._outlived.clear()

    def commit(self, batch: StepBatch, output: StepOutput, now: float) -> None:
        """Takes in a step's tokens: appends, publishes full pages, ends what is finished (its pages are free afterwards, or
        after the burst). A token of who ended earlier in the burst is thrown away."""
        results = results_of(output, len(batch.decodes) + sum([piece.sample for piece in batch.prefills]))
        self._count_waiting(now)
        wasted = 0
        append, decodes = self._append, Phase.DECODE
        # `zip` asks the decodes first, so that it leaves the prefills' results untouched.
        for sequence, (token, logprob) in zip(batch.decodes, results, strict=False):
            assert isinstance(sequence, Request)
            if sequence.phase is decodes:
                append(sequence, token, logprob, now)
            else:
                wasted += 1
        self._report(batch.prefills, None)
        self._commit_prefills(batch.prefills, results, now)
        self.counters.steps += 1
        self.counters.generated_tokens += len(output.tokens) - wasted
        self.counters.wasted_tokens += wasted

    def steps_alike(self, plan: StepPlan) -> Alike:
        """How often this plan, which was carried out last, is certain to come again unless something comes: see
        `policy.look_ahead`."""
        if plan.reason is not StepReason.DECODE_ONLY or len(plan.decode) != len(self.decoding):
            return NONE_ALIKE
        return steps_alike(self)

    def repeat(self, plan: StepPlan, steps: int, token: int, begin_s: float, end_s: float) -> None:
        """What so many steps that are alike do, with the same token for all; nobody is told. `begin_s`: of the last one."""
        self.now, self._counted_to_s = begin_s, end_s
        decodes = [self.requests[request_id] for request_id in plan.decode]
        grow(decodes, self.pool, steps, token)
        for request in decodes:
            request.token_s = end_s
        self._count(plan, steps)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * len(decodes)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> dict[str, list[TokenEvent]]:
        """The news since the last call, by sink."""
        events, self._events = self._events, {}
        return events

    # KV from another instance (`engine.handoffs`).

    def begin_transfer(self, request: Request, now: float) -> None:
        """A waiting request becomes a holder of its prefix hit, and is in TRANSFER."""
        self._leave_queue(request, request.prefix_hit(self.pool), Phase.TRANSFER, now)
        self.transferring.put(request)

    def share_transfer(self, request: Request, now: float) -> None:
        """A waiting request waits in TRANSFER for the KV of an equal prompt; it holds nothing."""
        self.waiting.remove(request)
        request.move(Phase.TRANSFER, now)
        self.transferring.put(request)

    def land(self, request: Request, tokens: int, now: float) -> None:
        """So many tokens have come: all known ones but the last are there, as if from the prefix cache, and it can decode."""
        self.transferring.remove(request)
        request.move(Phase.DECODE, now)
        self.decoding.put(request)
        request.peers.clear()
        request.received_tokens = tokens
        request.computed_tokens = request.known_tokens - 1
        if request.computed_tokens >= request.next_publish_tokens:
            request.publish(self.pool)

    def requeue(self, request: Request, now: float) -> None:
        """It gives up its pages, and waits again in its place by arrival."""
        self._queue(request).remove(request)
        request.give_up_pages(self.pool)
        request.move(Phase.QUEUED, now)
        self._wait(request)

    # Ends without a token.

    def abort(self, request_id: str, now: float) -> None:
        """Ends a live request; unknown ids are ignored (it may just have finished)."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end_early(request, TokenEvent(request_id, finish=FinishReason.ABORT), now)

    def fail(self, requests: Iterable[Request], error: PdmuxError, now: float) -> None:
        """Ends live requests with an ERROR event that carries the error; its message is for the client."""
        for request in list(requests):
            self._end_early(request, failure(request.request_id, error), now)

    def expire(self, now: float) -> None:
        """Fails every live request whose deadline has passed, whatever its phase; a fetch that is overdue is given up."""
        for request in list(self.requests.values()):
            if request.deadline_s is not None and now >= request.deadline_s:
                error = DeadlineError(
                    f"The request ran past its deadline after {request.generated_tokens} tokens (phase {request.phase.value})."
                )
                self.fail([request], error, now)
            elif request.phase is Phase.TRANSFER and now >= request.fetch_deadline_s:  # also when the port does not say so
                self.handoffs.give_up(request)
                self.requeue(request, now)

    def check_integrity(self) -> None:
        """Checks pages, queues, phases and lengths against each other. Raises IntegrityError."""
        phases = (Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.TRANSFER)
        queues = dict(zip(phases, (self.waiting, self.prefilling, self.decoding, self.transferring), strict=True))
        queued = [request for queue in queues.values() for request in queue]
        if len(queued) != len(self.requests) or {id(r) for r in queued} != {id(r) for r in self.requests.values()}:
            raise IntegrityError(f"{len(self.requests)} requests are live, but {len(queued)} are in queues")
        for phase, queue in queues.items():
            if any(older.arrival >= newer.arrival for older, newer in pairwise(queue)):
                raise IntegrityError(f"the {phase.value} queue is not in order of arrival")
            if queue != list(queue.noted):
                raise IntegrityError(f"the note of the {phase.value} queue is of another time")
            for request in queue:
                request.check_integrity(phase)
        self.pool.check_integrity(self._page_lists(), *self.handoffs.page_lists())

    def _wait(self, request: Request) -> None:
        request.likely_hit_tokens = request.prefix_hit(self.pool).tokens
        self.waiting.put(request)
        self.handoffs.enqueued(request)

    def _decide(self) -> StepPlan:
        return plan_step(self, self._batch_limits)

    def _page_lists(self) -> Iterable[Sequence[int]]:
        """The pages of everyone who holds any."""
        return (request.pages for request in self.requests.values())

    def _count(self, plan: StepPlan, steps: int) -> None:
        self.counters.steps_by_reason[plan.reason] += steps
        self.counters.page_evictions = self.pool.evictions

    def _count_waiting(self, now: float) -> None:
        if self.waiting:
            self.counters.queued_s += now - self._counted_to_s
        self._counted_to_s = now

    def _start(self, chunk: Chunk, now: float) -> Request:
        request = self.requests[chunk.request_id]
        hit = request.prefix_hit(self.pool)
        if hit.tokens != chunk.start:
            raise IntegrityError(f"{chunk} does not fit request {request.request_id}, which hits {hit.tokens} tokens")
        self._leave_queue(request, hit, Phase.PREFILL, now)
        self.prefilling.put(request)
        self.handoffs.started(request, self)
        return request

    def _leave_queue(self, request: Request, hit: Hit, phase: Phase, now: float) -> None:
        self.waiting.remove(request)
        request.start(hit, self.pool)
        request.move(phase, now)
        self.counters.prefix_hit_tokens += hit.tokens

    def _slice(self, chunk: Chunk) -> PrefillSlice:
        request = self.requests[chunk.request_id]
        end = chunk.start + chunk.tokens
        if request.phase is not Phase.PREFILL or chunk.start != request.computed_tokens or end > len(request.tokens):
            raise IntegrityError(f"{chunk} does not fit {request.phase.value} request with {request.computed_tokens} computed")
        return PrefillSlice(request, chunk.start, chunk.tokens, sample=end == len(request.tokens) and not request.exported)

    def _preempt(self, request: Request, now: float) -> None:
        if request.pinned:
            raise IntegrityError(f"request {request.request_id} cannot be preempted: another instance reads its pages")
        self.requeue(request, now)
        self.counters.preemptions += 1

    def _report(self, pieces: Iterable[PrefillSlice], layers: range | None) -> None:
        """Tells other instances of what has been computed for them in these layers (None: in all)."""
        for piece in pieces:
            request = piece.sequence
            assert isinstance(request, Request)
            if request.exported:
                self.handoffs.computed(request, layers, piece.start, piece.tokens, self.pool.page_size)

    def _commit_prefills(
        self, pieces: Sequence[PrefillSlice], results: Iterable[tuple[int, TokenLogprobs | None]], now: float
    ) -> None:
        sampled = iter(results)
        for piece in pieces:
            request = piece.sequence
            assert isinstance(request, Request)
            self.counters.prefill_tokens += piece.tokens
            if not piece.sample:
                request.computed_tokens += piece.tokens
                if request.computed_tokens >= request.next_publish_tokens:
                    request.publish(self.pool)
                if request.computed_tokens == len(request.tokens):
                    self._end(request, Phase.DONE, FinishReason.LENGTH, now)  # an export
                continue
            self.prefilling.remove(request)
            request.move(Phase.DECODE, now)
            self.decoding.put(request)
            token, logprob = next(sampled)
            self._append(request, token, logprob, now)

    def _append(self, request: Request, token: int, logprob: TokenLogprobs | None, now: float) -> None:
        """Takes in the token sampled from a request of which every known token is now computed."""
        tokens = request.tokens
        request.computed_tokens = computed = len(tokens)
        if computed >= request.next_publish_tokens:
            request.publish(self.pool)
        tokens.append(token)
        request.token_s = now
        event = TokenEvent(request.request_id, token, logprob)
        if computed == request.given_tokens:
            event.cached_tokens = request.cached_tokens
            event.stage_s = request.stage_s(now)
            request.ttft_deadline_s = math.inf
            self.counters.kv_used_tokens += request.received_tokens
        if request.stop_ids or computed + 1 >= request.limit_tokens:
            finish = request.finish_reason(token)
            if finish is not None:
                event.finish = finish
                self._end(request, Phase.DONE, finish, now)
        self._tell(request.sink, event)

    def _end_early(self, request: Request, event: TokenEvent, now: float) -> None:
        """Ends it with an event that has no token."""
        assert event.finish is not None
        if request.known_tokens == request.given_tokens:
            event.cached_tokens = request.cached_tokens
        self._end(request, Phase.FAILED if event.finish is FinishReason.ERROR else Phase.DONE, event.finish, now)
        if not request.exported:
            self._tell(request.sink, event)

    def _end(self, request: Request, phase: Phase, finish: FinishReason, now: float) -> None:
        """The one place where a request leaves: its queue, its pages, its id."""
        self._queue(request).remove(request)
        self._let_go(request)
        request.move(phase, now)
        del self.requests[request.request_id]
        self.handoffs.ended(request, finish)
        self.timeline.ended(now, request.request_id, finish.value, request.generated_tokens)
        if not request.exported:
            self.counters.finished[finish] += 1
        if self.waiting:
            self.counters.queued_finishes_s.append(self.counters.queued_s)

    def _let_go(self, request: Request) -> None:
        """Frees the pages of a request that ends."""
        if self._steps_left:
            self._outlived.append(request)
        else:
            request.give_up_pages(self.pool)

    def _queue(self, request: Request) -> Queue:
        if request.phase is Phase.DECODE:
            return self.decoding
        if request.phase is Phase.PREFILL:
            return self.prefilling
        return self.transferring if request.phase is Phase.TRANSFER else self.waiting

    def _tell(self, sink: str, event: TokenEvent) -> None:
        events = self._events.get(sink)
        if events is None:
            self._events[sink] = [event]
        else:
            events.append(event)


def results_of(output: StepOutput, expected: int) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """Each sampled token with its logprobs. Raises IntegrityError when there are not as many as expected."""
    tokens = output.tokens
    logprobs: Iterable[TokenLogprobs | None] = output.logprobs or repeat(None, len(tokens))
    if len(tokens) != expected or len(output.logprobs) not in (0, expected):
        raise IntegrityError(
            f"a step that samples {expected} tokens answered with {len(tokens)} tokens and {len(output.logprobs)} logprobs"
        )
    return zip(tokens, logprobs, strict=True)


def failure(request_id: str, error: PdmuxError) -> TokenEvent:
    """The event that ends a request with an error."""
    return TokenEvent(request_id, finish=FinishReason.ERROR, error=str(error), error_type=type(error).__name__)
