"""How it is in an engine now, as the metrics tell it."""

from __future__ import annotations

import json

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.timeline import Timeline
from pdmux_ray.policy.decisions import Block, Chunk, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import Mode, Phase, Split

from .lane_world import lanes_of, started
from .world import PAGE, Worlds, limits, request


def test_pages_by_owner_add_up_to_the_pool_whatever_happens(worlds: Worlds) -> None:
    engine, _ = worlds(limits(max_batch=2), pages=16)
    seen = set()
    for name in ("a", "b", "c"):
        engine.submit(request(name, [1] * 2 * PAGE, max_tokens=6))
    while engine.step():
        pages = engine.figures()["pdmux_pages"]
        assert isinstance(pages, dict)
        assert sum(pages.values()) == 16
        seen.update(owner for owner, count in pages.items() if count)
    assert seen == {"free", "held", "cached"}
    assert pages.keys() == {"free", "held", "cached", "leased", "quarantined"}


def test_the_oldest_waits_since_it_came_and_nobody_does_when_all_run(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, log = worlds(limits(max_batch=1), clock=clock)
    engine.submit(request("runs", max_tokens=3))
    engine.submit(request("waits", max_tokens=3))
    came_s = clock.now()
    engine.step()
    assert engine.figures()["pdmux_oldest_waiting_seconds"] == pytest.approx(clock.now() - came_s)
    while not log.tokens("waits"):
        engine.step()
    assert engine.figures()["pdmux_oldest_waiting_seconds"] == 0


def test_a_request_that_was_preempted_waits_since_then(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, _ = worlds(limits(max_batch=2), pages=6, clock=clock)
    for name in ("old", "new"):
        engine.submit(request(name, [3] * 2 * PAGE, max_tokens=12, seed=len(name)))
    while not engine.counters.preemptions:
        engine.step()
    waited_s = engine.figures()["pdmux_oldest_waiting_seconds"]
    assert isinstance(waited_s, float)
    assert 0 < waited_s < clock.now() / 2


def test_lanes_tell_the_units_that_they_work_on(worlds: Worlds) -> None:
    engine, log, _ = started(worlds)
    assert engine.figures()["pdmux_lane_units"] == {"prefill": 4, "decode": 4}
    while not (log.finish("reader") and log.finish("long")):
        engine.step()
    engine.step()
    assert lanes_of(engine).lane_units == {"prefill": 0, "decode": 0}


def test_a_device_without_lanes_tells_no_units_and_without_a_model_there_is_no_guard(worlds: Worlds) -> None:
    engine, _ = worlds()
    engine.submit(request("r"))
    while engine.step():
        pass
    figures = engine.figures()
    assert json.loads(json.dumps(figures)) == figures
    assert figures.keys().isdisjoint({"pdmux_lane_units", "pdmux_guard_factor"})
    assert figures.items() >= engine.counters.figures().items()


USE = LaneUse(Mode.SPLIT, Split(3, 1), ModeReason.FITS, Block(3, (), 12), Estimate(0.02, 0.03), Estimate(0.05, 0.06))


def test_work_is_timed_by_its_kind_beside_its_prediction() -> None:
    ring = Timeline(units=4, mode=Mode.SPLIT)
    ring.step(StepPlan(StepReason.LANES_BOTH, ("a",), lanes=USE), 1.0, 1.5, waiting=0)
    ring.block(USE, job_id=3, first_layer=5, tokens=700, begin_s=2.0, end_s=2.25)
    mixed = StepPlan(StepReason.CHUNK_MIXED, ("a",), (Chunk("b", 0, 4),), step_s=Estimate(0.125, 0.2))
    ring.step(mixed, 3.0, 3.125, waiting=0)
    assert {kind: found.sum for kind, found in ring.times.took.items()} == {"decode": 0.5, "prefill": 0.25, "mixed": 0.125}
    assert {kind: found.sum for kind, found in ring.times.predicted.items()} == {
        "decode": 0.02,
        "prefill": 0.05,
        "mixed": 0.125,
    }
    assert ring.guard_factor() == pytest.approx((0.03 + 0.06 + 0.2) / (0.02 + 0.05 + 0.125))


def test_a_step_that_was_not_predicted_is_in_what_was_measured_alone() -> None:
    ring = Timeline(units=4, mode=Mode.CHUNKED)
    ring.step(StepPlan(StepReason.DECODE_ONLY, ("a",)), 1.0, 1.5, waiting=0)
    assert sum(ring.times.took["decode"].counts) == 1
    assert sum(ring.times.predicted["decode"].counts) == 0
    assert ring.guard_factor() is None


@pytest.mark.parametrize("mode", [Mode.PREFILL_FIRST, Mode.CHUNKED])
def test_the_stages_of_a_first_token_add_up_to_all_the_time_since_it_came(worlds: Worlds, mode: Mode) -> None:
    clock = VirtualClock()
    engine, log = worlds(limits(mode=mode, max_batch=1), clock=clock)
    first_s: dict[str, float] = {}
    for name in ("first", "second"):
        engine.submit(request(name, [1, 2] * 2 * PAGE, max_tokens=3))
    while engine.step():
        first_s |= {name: clock.now() for name in log.events if log.tokens(name) and name not in first_s}
    for name, at_s in first_s.items():
        told = [event.stage_s for event in log.events[name]]
        assert told[0] is not None
        assert sum(told[0]) == pytest.approx(at_s)
        assert set(told[1:]) == {None}
    queue_s, transfer_s, prefill_s = log.events["second"][0].stage_s or (0, 0, 0)
    assert queue_s > prefill_s > 0 == transfer_s


def test_a_transfer_that_was_in_vain_is_no_time_in_the_queue() -> None:
    one = Request(request("r"), context_length=64, eos_token_ids=frozenset(), page_size=PAGE, prefix_cache=False, now=1.0)
    for at_s, phase in ((1.5, Phase.TRANSFER), (2.5, Phase.QUEUED), (2.75, Phase.PREFILL), (3.0, Phase.DECODE)):
        one.move(phase, at_s)
    assert one.stage_s(3.125) == (0.5 + 0.25, 1.0, 0.25 + 0.125)
