from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.policy.batching import BatchLimits, plan_step
from pdmux_ray.policy.decisions import Chunk, StepPlan, StepReason
from pdmux_ray.policy.views import RequestView
from pdmux_ray.types import ONE_PASS_MODES, Mode

PAGE = 16


@dataclass(frozen=True)
class Seen:
    """A request in a view."""

    request_id: str
    known_tokens: int
    computed_tokens: int = 0
    held_pages: int = 0
    arrival: int = 0
    ttft_deadline_s: float = math.inf
    pinned: bool = False
    prefix_key: bytes | None = None
    token_s: float = 0.0
    left_tokens: int = 1
    deadline_s: float | None = None
    host_sampled: bool = False
    stops_early: bool = False


@dataclass(frozen=True)
class HitSeen:
    tokens: int = 0
    evictable_pages: int = 0


@dataclass(frozen=True)
class View:
    """One instance, as plain data. `shared_pages` are held by everyone who runs."""

    free_pages: int = 100
    decoding: Sequence[Seen] = ()
    prefilling: Sequence[Seen] = ()
    waiting: Sequence[Seen] = ()
    hits: dict[str, HitSeen] = field(default_factory=dict)
    shared_pages: int = 0
    page_size: int = PAGE
    transferring: Sequence[Seen] = ()

    def prefix_hit(self, request: RequestView) -> HitSeen:
        return self.hits.get(request.request_id, HitSeen())

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        everyone = len(requests) == len(self.decoding) + len(self.prefilling)
        freed = sum(request.held_pages - self.shared_pages for request in requests)
        return freed + self.shared_pages if everyone else freed


def decoding(name: str, known: int, arrival: int = 0) -> Seen:
    return Seen(name, known, known - 1, -(-(known - 1) // PAGE), arrival)


def prefilling(name: str, known: int, computed: int, arrival: int = 0) -> Seen:
    return Seen(name, known, computed, -(-known // PAGE), arrival)


def limits(mode: Mode, chunk_tokens: int = 64, max_prefill_tokens: int = 100, max_batch: int = 8) -> BatchLimits:
    return BatchLimits(mode, chunk_tokens, max_prefill_tokens, max_batch)


FIRST, CHUNKED = Mode.PREFILL_FIRST, Mode.CHUNKED


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
def test_an_empty_engine_does_nothing(mode: Mode) -> None:
    assert plan_step(View(), limits(mode)) == StepPlan(StepReason.IDLE)


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
def test_without_anyone_waiting_all_decode(mode: Mode) -> None:
    view = View(decoding=[decoding("a", 5), decoding("b", 40)])
    assert plan_step(view, limits(mode)) == StepPlan(StepReason.DECODE_ONLY, decode=("a", "b"))


def test_prefill_first_lets_decode_wait_and_runs_prompts_whole_while_they_fit() -> None:
    view = View(decoding=[decoding("a", 5)], waiting=[Seen("b", 60), Seen("c", 40), Seen("d", 1)])
    plan = plan_step(view, limits(FIRST, max_prefill_tokens=100))
    assert plan == StepPlan(StepReason.PREFILL_WHOLE, prefill=(Chunk("b", 0, 60), Chunk("c", 0, 40)))


def test_prefill_first_runs_the_first_prompt_whatever_its_length() -> None:
    view = View(waiting=[Seen("a", 1000), Seen("b", 1)])
    plan = plan_step(view, limits(FIRST, max_prefill_tokens=100))
    assert plan == StepPlan(StepReason.PREFILL_WHOLE, prefill=(Chunk("a", 0, 1000),))


def test_prefill_first_does_not_let_a_short_prompt_overtake_one_that_does_not_fit() -> None:
    view = View(waiting=[Seen("a", 60), Seen("b", 60), Seen("c", 1)])
    assert plan_step(view, limits(FIRST, max_prefill_tokens=100)).prefill == (Chunk("a", 0, 60),)


def test_a_prefix_hit_is_not_computed_and_not_counted_against_the_budget() -> None:
    view = View(waiting=[Seen("a", 100), Seen("b", 20)], hits={"a": HitSeen(tokens=80, evictable_pages=5)})
    plan = plan_step(view, limits(FIRST, max_prefill_tokens=40))
    assert plan.prefill == (Chunk("a", 80, 20), Chunk("b", 0, 20))


def test_chunked_fills_the_budget_beside_every_decode() -> None:
    view = View(decoding=[decoding("a", 5), decoding("b", 9)], waiting=[Seen("c", 50), Seen("d", 50), Seen("e", 1)])
    plan = plan_step(view, limits(CHUNKED, chunk_tokens=64))
    assert plan == StepPlan(StepReason.CHUNK_MIXED, decode=("a", "b"), prefill=(Chunk("c", 0, 50), Chunk("d", 0, 12)))


def test_chunked_goes_on_with_the_oldest_prefill_before_it_starts_another() -> None:
    view = View(prefilling=[prefilling("a", 100, 64), prefilling("b", 40, 0)], waiting=[Seen("c", 10)])
    plan = plan_step(view, limits(CHUNKED, chunk_tokens=64))
    assert plan == StepPlan(StepReason.CHUNK_ONLY, prefill=(Chunk("a", 64, 36), Chunk("b", 0, 28)))


def test_decodes_that_use_up_the_chunk_budget_leave_none_for_prefill() -> None:
    view = View(decoding=[decoding("a", 5), decoding("b", 9)], waiting=[Seen("c", 10)])
    plan = plan_step(view, limits(CHUNKED, chunk_tokens=2))
    assert plan == StepPlan(StepReason.DECODE_NO_BUDGET, decode=("a", "b"))


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
def test_a_full_batch_blocks_the_queue(mode: Mode) -> None:
    view = View(decoding=[decoding("a", 5), decoding("b", 9)], waiting=[Seen("c", 10)])
    plan = plan_step(view, limits(mode, max_batch=2))
    assert plan == StepPlan(StepReason.DECODE_BATCH_FULL, decode=("a", "b"))


def test_a_prefill_under_way_takes_a_place_in_the_batch() -> None:
    view = View(prefilling=[prefilling("a", 20, 16)], waiting=[Seen("b", 10), Seen("c", 10)])
    assert plan_step(view, limits(CHUNKED, max_batch=2)).prefill == (Chunk("a", 16, 4), Chunk("b", 0, 10))


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
@pytest.mark.parametrize(("free_pages", "starts"), [(3, True), (2, False)])
def test_a_request_starts_only_with_pages_for_all_its_known_tokens(mode: Mode, free_pages: int, starts: bool) -> None:
    view = View(free_pages=free_pages, decoding=[decoding("a", 5)], waiting=[Seen("b", 33)])
    plan = plan_step(view, limits(mode, chunk_tokens=4))
    assert bool(plan.prefill) is starts
    assert starts or plan == StepPlan(StepReason.DECODE_NO_PAGES, decode=("a",))


def test_a_request_without_pages_blocks_a_smaller_one_behind_it() -> None:
    view = View(free_pages=2, decoding=[decoding("a", 5)], waiting=[Seen("b", 33), Seen("c", 1)])
    assert plan_step(view, limits(FIRST)).prefill == ()


@pytest.mark.parametrize(("evictable_pages", "starts"), [(0, True), (2, False)])
def test_taking_evictable_hit_pages_uses_up_free_pages(evictable_pages: int, starts: bool) -> None:
    hit = HitSeen(tokens=32, evictable_pages=evictable_pages)
    view = View(free_pages=2, decoding=[decoding("a", 5)], waiting=[Seen("b", 49)], hits={"b": hit})
    assert bool(plan_step(view, limits(FIRST)).prefill) is starts


@pytest.mark.parametrize(("known", "grows"), [(16, False), (17, True), (18, False), (32, False), (33, True)])
def test_a_decode_needs_a_page_exactly_when_its_newest_token_begins_one(known: int, grows: bool) -> None:
    view = View(free_pages=1, decoding=[decoding("a", known)], waiting=[Seen("b", 1)])
    assert (plan_step(view, limits(CHUNKED)).prefill == ()) is grows


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
def test_the_newest_requests_are_preempted_until_the_decodes_can_grow(mode: Mode) -> None:
    running = [
        decoding("a", 17, arrival=1),
        decoding("b", 17, arrival=2),
        decoding("c", 20, arrival=3),
        decoding("d", 5, arrival=4),
    ]
    plan = plan_step(View(free_pages=0, decoding=running, waiting=[Seen("e", 1)]), limits(mode))
    assert plan == StepPlan(StepReason.PREEMPT, decode=("a", "b"), preempt=("d", "c"))


def test_a_prefill_under_way_is_preempted_when_it_is_the_newest() -> None:
    view = View(free_pages=0, decoding=[decoding("a", 17, arrival=1)], prefilling=[prefilling("b", 40, 8, arrival=2)])
    plan = plan_step(view, limits(CHUNKED))
    assert plan == StepPlan(StepReason.PREEMPT, decode=("a",), preempt=("b",))


def test_a_decode_that_is_newer_than_a_prefill_is_preempted_first() -> None:
    view = View(
        free_pages=0,
        decoding=[decoding("a", 17, arrival=1), decoding("c", 20, arrival=3)],
        prefilling=[prefilling("b", 40, 8, arrival=2)],
    )
    plan = plan_step(view, limits(CHUNKED, chunk_tokens=11))
    assert plan == StepPlan(StepReason.PREEMPT, decode=("a",), prefill=(Chunk("b", 8, 10),), preempt=("c",))


def test_a_preempted_request_no_longer_asks_for_a_page_itself() -> None:
    running = [decoding("a", 17, arrival=1), decoding("b", 17, arrival=2)]
    assert plan_step(View(free_pages=1, decoding=running, shared_pages=1), limits(FIRST)).preempt == ("b",)


def test_preempting_one_sharer_does_not_free_the_shared_pages() -> None:
    running = [decoding("a", 33, arrival=1), decoding("b", 32, arrival=2), decoding("c", 32, arrival=3)]
    plan = plan_step(View(free_pages=0, decoding=running, shared_pages=2), limits(FIRST))
    assert plan.preempt == ("c", "b", "a")


@st.composite
def views(draw: st.DrawFn) -> View:
    names = iter(range(1000))
    lengths = st.integers(1, 100)
    running = [decoding(f"d{next(names)}", draw(lengths) + 1, arrival=i) for i in range(draw(st.integers(0, 6)))]
    partial = []
    for i in range(draw(st.integers(0, 3))):
        known = draw(lengths)
        partial.append(prefilling(f"p{next(names)}", known, draw(st.integers(0, known - 1)), arrival=100 + i))
    waiting, hits = [], {}
    for i in range(draw(st.integers(0, 5))):
        request = Seen(f"w{next(names)}", draw(lengths), arrival=200 + i)
        hit_pages = draw(st.integers(0, (request.known_tokens - 1) // PAGE))
        hits[request.request_id] = HitSeen(hit_pages * PAGE, draw(st.integers(0, hit_pages)))
        waiting.append(request)
    return View(draw(st.integers(0, 30)), running, partial, waiting, hits)


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may slow the machine
any_limits = st.builds(
    BatchLimits,
    st.sampled_from(ONE_PASS_MODES),
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(1, 8),
)


@patient
@given(views(), any_limits)
def test_every_plan_can_be_carried_out_and_keeps_the_limits(view: View, any_limit: BatchLimits) -> None:
    plan = plan_step(view, any_limit)
    seen = {r.request_id: r for r in [*view.decoding, *view.prefilling, *view.waiting]}
    holders = [*view.decoding, *view.prefilling]
    started = [seen[c.request_id] for c in plan.prefill if seen[c.request_id] in view.waiting]
    preempted = [seen[name] for name in plan.preempt]

    growth = sum(seen[name].known_tokens > seen[name].held_pages * PAGE for name in plan.decode)
    fresh = sum(-(-r.known_tokens // PAGE) - view.hits[r.request_id].tokens // PAGE for r in started)
    taken = growth + fresh + sum(view.hits[r.request_id].evictable_pages for r in started)
    assert taken <= view.free_pages + view.pages_freed(preempted)

    assert preempted == sorted(holders, key=lambda r: -r.arrival)[: len(preempted)]
    assert list(view.waiting[: len(started)]) == started
    assert not (started and preempted)
    assert (plan.reason is StepReason.PREEMPT) is bool(preempted and (plan.decode or plan.prefill))
    assert (plan.reason is StepReason.IDLE) is (not plan.decode and not plan.prefill)
    assert not started or len(holders) + len(started) <= any_limit.max_batch
    for chunk in plan.prefill:
        request = seen[chunk.request_id]
        start = view.hits[request.request_id].tokens if request in view.waiting else request.computed_tokens
        assert chunk.start == start
        assert 1 <= chunk.tokens <= request.known_tokens - start
    tokens = sum(chunk.tokens for chunk in plan.prefill)
    if any_limit.mode is Mode.CHUNKED:
        assert not plan.prefill or tokens + len(plan.decode) <= any_limit.chunk_tokens
        assert plan.decode == tuple(r.request_id for r in view.decoding if r not in preempted)
    else:
        assert len(plan.prefill) <= 1 or tokens <= any_limit.max_prefill_tokens
        assert not (plan.prefill and plan.decode)


@patient
@given(views(), any_limits)
def test_planning_again_gives_the_same_plan(view: View, any_limit: BatchLimits) -> None:
    assert plan_step(view, any_limit) == plan_step(view, any_limit)
