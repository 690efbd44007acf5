"""What holds of every plan, and of every closed world that is planned for."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import ModeReason, StepPlan
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.types import Mode, Split
from tests.examples import tried
from tests.unit.policy.lanes import (
    PAGE,
    Asked,
    HitSeen,
    Lanes,
    World,
    begun,
    check,
    decoder,
    disjoint,
    pages_of,
    waiter,
    with_jobs,
)

patient = settings(deadline=None, max_examples=tried(30), suppress_health_check=[HealthCheck.too_slow])
worlds = settings(deadline=None, max_examples=tried(10), suppress_health_check=[HealthCheck.too_slow])
MODES = st.sampled_from([Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, Mode.CHUNKED, Mode.AUTO])
DUES = st.one_of(st.just(math.inf), st.floats(-5, 60))


@st.composite
def costs(draw: st.DrawFn) -> FakeCosts:
    return FakeCosts(
        units=draw(st.integers(2, 9)),
        knee=draw(st.sampled_from([1, 3, 1000])),
        token_s=draw(st.sampled_from([0.00002, 0.001])),
        contention=draw(st.sampled_from([0.0, 0.5])),
    )


@st.composite
def views(draw: st.DrawFn, units: int) -> Lanes:
    lengths = st.integers(1, 400)
    running = [decoder(f"d{i}", draw(lengths) + 1, i) for i in range(draw(st.integers(0, 5)))]
    for request in running:
        request.held_pages -= draw(st.booleans()) and request.known_tokens % PAGE == 1 and request.known_tokens > 1
        request.left, request.host_sampled = draw(st.integers(1, 12)), draw(st.integers(0, 9)) == 9
    view = Lanes(units, free_pages=draw(st.integers(0, 60)), decoding=running, now=draw(st.floats(0, 50)))
    jobs = []
    for i in range(draw(st.integers(0, 3))):
        members = [waiter(f"j{i}{k}", draw(lengths), draw(DUES), 10 + 3 * i + k) for k in range(draw(st.integers(1, 3)))]
        jobs.append(begun(i + 1, *members, done=draw(st.integers(0, 29)), overtaken=draw(st.integers(0, 16))))
    if jobs and draw(st.booleans()):
        flying = jobs[draw(st.integers(0, len(jobs) - 1))]
        flying.in_flight, flying.ends_s = True, view.now + draw(st.floats(-0.1, 0.5))
    with_jobs(view, *jobs)
    if draw(st.booleans()):
        known = draw(st.integers(2, 300))
        half = Asked("half", known, 30, draw(st.integers(1, known - 1)), pages_of(known), draw(DUES))
        view.prefilling.append(half)
    for i in range(draw(st.integers(0, 4))):
        request = waiter(f"w{i}", draw(lengths), draw(DUES), 40 + i)
        hit_pages = draw(st.integers(0, (request.known_tokens - 1) // PAGE))
        view.hits[request.request_id] = HitSeen(hit_pages * PAGE, draw(st.integers(0, hit_pages)))
        view.waiting.append(request)
    view.mode = draw(st.sampled_from([Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, *([] if jobs else [Mode.CHUNKED])]))
    split = draw(st.sampled_from(disjoint(units)))
    view.split = Split(split.prefill_units, units) if view.mode is Mode.CAPPED else split
    return view


@st.composite
def cases(draw: st.DrawFn) -> tuple[Lanes, LaneLimits, FakeCosts]:
    device = draw(costs())
    view = draw(views(device.units))
    mode = draw(MODES)
    if view.jobs and mode is Mode.CHUNKED:
        mode = Mode.AUTO  # an engine that only chunks has no jobs
    itl_s = draw(st.sampled_from([0.001, 0.02, 0.05, 0.2, math.inf]))
    limits = LaneLimits(mode, draw(st.integers(1, 24)), 2048, itl_s=itl_s, most_steps=draw(st.integers(1, 8)))
    return view, limits, device


def block_or_chunks(plan: StepPlan) -> bool:
    return bool(plan.prefill or (plan.lanes and plan.lanes.block))


@patient
@given(cases())
def test_every_plan_can_be_carried_out(case: tuple[Lanes, LaneLimits, FakeCosts]) -> None:
    view, limits, device = case
    plan = plan_lanes(view, limits, device)
    check(view, plan)
    assert plan == plan_lanes(view, limits, device), "planning again gives another plan"
    started = [request for request in view.waiting if request.request_id in {c.request_id for c in _chunks(plan)}]
    assert not (started and plan.preempt)
    assert not started or len(view.holders) + len(started) <= limits.max_batch


@patient
@given(cases())
def test_a_burst_changes_nothing_but_the_number_of_steps(case: tuple[Lanes, LaneLimits, FakeCosts]) -> None:
    view, limits, device = case
    plan = plan_lanes(view, limits, device)
    assert replace(plan, steps=1, burst=None) == plan_lanes(view, replace(limits, most_steps=1), device)
    assert 1 <= plan.steps <= limits.most_steps


def _chunks(plan: StepPlan) -> list[object]:
    return [*plan.prefill, *(plan.lanes.block.chunks if plan.lanes and plan.lanes.block else ())]


@patient
@given(cases())
def test_a_free_prefill_lane_is_given_work_when_there_is_any_that_has_pages(case: tuple[Lanes, LaneLimits, FakeCosts]) -> None:
    view, limits, device = case
    plan = plan_lanes(view, limits, device)
    left = [request for request in view.prefilling if request.request_id not in plan.preempt]
    if view.held is None and (left or (view.waiting and not plan.preempt and _roomy(view, limits))):
        assert block_or_chunks(plan)


def _roomy(view: Lanes, limits: LaneLimits) -> bool:
    growth = sum(request.known_tokens > request.held_pages * PAGE for request in view.decoding)
    enough = view.free_pages - growth >= max(pages_of(request.known_tokens) for request in view.waiting)
    return enough and len(view.holders) < limits.max_batch


@patient
@given(cases())
def test_the_itl_bound_holds_whenever_some_split_holds_it(case: tuple[Lanes, LaneLimits, FakeCosts]) -> None:
    """But where AUTO says that it takes a risk, or stays with a mode that it has just taken."""
    view, limits, device = case
    use = plan_lanes(view, limits, device).lanes
    if use is None or use.mode is not Mode.SPLIT or use.block is None or use.decode_s is None:
        return
    batch, context = len(view.decoding), sum(request.known_tokens for request in view.decoding)
    fits = [s for s in view.splits if device.decode(batch, context, s.decode_units, s.prefill_units).bound_s <= limits.itl_s]
    if fits and not plan_lanes(view, limits, device).preempt:
        assert use.decode_s.bound_s <= limits.itl_s or use.why in (ModeReason.RISK, ModeReason.DWELL)
        assert use.split.decode_units == min(split.decode_units for split in fits) or limits.mode is Mode.AUTO


@patient
@given(cases(), st.floats(1, 4))
def test_a_looser_objective_never_gives_the_prefill_fewer_units(
    case: tuple[Lanes, LaneLimits, FakeCosts], looser: float
) -> None:
    view, limits, device = case
    for mode in (Mode.SPLIT, Mode.CAPPED):
        tight = plan_lanes(view, replace(limits, mode=mode), device).lanes
        loose = plan_lanes(view, replace(limits, mode=mode, itl_s=limits.itl_s * looser), device).lanes
        assert (tight is None) is (loose is None)
        assert not tight or not loose or loose.split.prefill_units >= tight.split.prefill_units


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, Asked]]:
    coming, at_s = [], 0.0
    for i in range(draw(st.integers(1, 10))):
        at_s += draw(st.floats(0, 0.5))
        tokens = draw(st.sampled_from([3, 60, 400, 3000]))
        due_s = at_s + 0.3 + 0.003 * tokens * draw(st.sampled_from([1.0, 1.0, math.inf]))
        coming.append((at_s, Asked(f"r{i}", tokens, i, ttft_deadline_s=due_s, left=draw(st.integers(1, 25)))))
    return coming


@worlds
@given(arrivals(), costs(), MODES, st.sampled_from([0.02, 0.066, 0.3]), st.integers(200, 400), st.integers(1, 8))
def test_everyone_ends_and_nobody_is_overtaken_too_often(
    coming: list[tuple[float, Asked]], device: FakeCosts, mode: Mode, itl_s: float, pages: int, most_steps: int
) -> None:
    limits = LaneLimits(mode, 8, 2048, itl_s=itl_s, overtakes=2, share_s=0.1, most_steps=most_steps)
    world = World(device, coming, pages)
    world.run(lambda view: plan_lanes(view, limits, device))
    assert sorted(world.done) == sorted(request.request_id for _, request in coming)
    assert world.free_pages == pages
    assert world.most_overtaken <= 2


@worlds
@given(arrivals(), st.sampled_from([Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED]), st.integers(1, 40))
def test_a_fixed_rule_without_predictions_serves_everyone_too(
    coming: list[tuple[float, Asked]], mode: Mode, layers: int
) -> None:
    limits = LaneLimits(mode, 8, 2048, rule=FixedRule(Split(1, 1), layers))
    world = World(FakeCosts(), coming, 400)
    world.run(lambda view: plan_lanes(view, limits, None))
    assert len(world.done) == len(coming)


def test_short_prompts_overtake_a_very_long_one_and_neither_starves() -> None:
    device = FakeCosts(pair_s=0.0)
    coming = [(0.0, Asked("chat", 50, 0, left=4000)), (0.5, Asked("long", 10_000, 1, ttft_deadline_s=10.0, left=2))]
    coming += [(1.0 + i, Asked(f"s{i}", 100, 2 + i, ttft_deadline_s=3.0 + i, left=2)) for i in range(60)]  # one a second
    world = World(device, coming, 10_000)
    limits = LaneLimits(Mode.SPLIT, 64, 2048, itl_s=0.1, overtakes=8)
    world.run(lambda view: plan_lanes(view, limits, device))
    waited_s = [world.first_token_s[f"s{i}"] - (1.0 + i) for i in range(60)]
    assert max(waited_s[:8]) < 2
    assert world.most_overtaken == 8
    assert 20 < world.first_token_s["long"] < 30
    assert max(waited_s[30:]) < 2


def test_auto_is_as_good_as_the_best_mode_that_keeps_the_objective() -> None:
    for device, itl_s in ((FakeCosts(), 0.066), (FakeCosts(units=8, knee=3, request_s=0.0, token_s=0.0001), 0.025)):
        ends: dict[Mode, float] = {}
        for mode in (Mode.AUTO, Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, Mode.CHUNKED):
            coming = [(0.0, Asked(f"d{i}", 16, i, left=200)) for i in range(4)] + [(0.5, Asked("w", 2048, 9))]
            world = World(device, coming, 10_000)
            limits = LaneLimits(mode, 64, 2048, itl_s=itl_s)
            world.run(lambda view: plan_lanes(view, limits, device))  # noqa: B023 - called at once
            if max(world.gaps_s) <= itl_s:
                ends[mode] = world.first_token_s["w"]
        assert len(ends) > 2
        assert ends[Mode.AUTO] <= 1.05 * min(ends.values()), ends


def test_reasons_of_a_world_are_those_of_its_mode() -> None:
    coming = [(0.0, Asked("a", 50, 0, left=40)), (0.2, Asked("b", 500, 1))]
    world = World(FakeCosts(), coming, 100)
    world.run(lambda view: plan_lanes(view, LaneLimits(Mode.SPLIT, 8, 2048, itl_s=0.066), FakeCosts()))
    reasons = [plan.lanes.why for plan in world.plans if plan.lanes]
    assert set(reasons) <= {ModeReason.NO_DECODE, ModeReason.NO_PREFILL, ModeReason.FITS, ModeReason.HELD}
    assert ModeReason.FITS in reasons
