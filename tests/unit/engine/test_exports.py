"""The prefill side of a handoff: a prompt of another instance is computed here, told of as it is, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kv_transfer.api import HandoffId, Sent
from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.counters import ExportEnd
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.handoffs import export_id
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import Runner
from pdmux_ray.types import Mode

from .export_world import WANTED, Peer
from .lane_world import LAYERS, device, fixed
from .runners import FailingRunner, InterruptedRunner, LayeredRunner
from .test_lane_ends import BlockFails
from .test_schedules import drain
from .world import PAGE, VOCAB, Log, StrictRunner, Worlds, limits, request

ALL = range(LAYERS)
BOUNDS = pytest.mark.parametrize(
    "bounds", [limits(), limits(mode=Mode.CHUNKED), fixed(3)], ids=["prefill_first", "chunked", "split"]
)


def test_a_pass_of_every_layer_is_told_at_once(instances: Any) -> None:
    p = instances()
    p.peer.want(range(10))
    drain(p.engine)
    assert p.peer.reports == [(ALL, range(10))]
    p.peer.sent()
    drain(p.engine)


def test_chunks_are_told_one_by_one(instances: Any) -> None:
    p = instances(limits(mode=Mode.CHUNKED, chunk_tokens=6))
    p.peer.want(range(14))
    drain(p.engine)
    assert p.peer.reports == [(ALL, range(6)), (ALL, range(6, 12)), (ALL, range(12, 14))]
    p.peer.sent()
    drain(p.engine)


def of_twenty_layers(clock: Clock) -> Runner:
    return LayeredRunner(64, PAGE, 0.01, 0.0, clock, vocab_size=VOCAB, layers=20)


def test_of_the_pass_that_ends_a_prompt_every_part_of_the_layers_is_told_while_it_goes_on(instances: Any) -> None:
    p = instances(limits(mode=Mode.CHUNKED, chunk_tokens=6), runner=of_twenty_layers)
    p.peer.want(range(14))
    drain(p.engine)
    parts, every = [(range(first, first + 3), range(12, 14)) for first in range(0, 18, 3)], range(20)
    assert p.peer.reports == [(every, range(6)), (every, range(6, 12)), *parts, (every, range(12, 14))]
    p.peer.sent()
    drain(p.engine)


def test_with_lanes_every_layer_block_is_told_when_it_has_ended(instances: Any) -> None:
    p = instances(fixed(3))
    p.peer.want(range(10))
    told = []
    while p.engine.step():
        told.append(len(p.peer.reports))
        p.engine.check_integrity()
    assert p.peer.reports == [(range(3), range(10)), (range(3, 6), range(10)), (range(6, 8), range(10))]
    assert told == [1, 2, 3]
    p.peer.sent()
    drain(p.engine)


@BOUNDS
def test_what_the_prefix_cache_has_is_told_before_anything_is_computed(instances: Any, bounds: EngineLimits) -> None:
    p = instances(bounds)
    p.serve(request("before", range(2 * PAGE), max_tokens=1))
    p.peer.want(range(3 * PAGE))
    drain(p.engine)
    assert p.peer.reports[0] == (ALL, range(2 * PAGE))
    assert all(tokens == range(2 * PAGE, 3 * PAGE) for _, tokens in p.peer.reports[1:])
    assert len(p.peer.reports) > 1
    p.peer.sent()
    drain(p.engine)


@BOUNDS
def test_an_export_tells_no_client_samples_nothing_and_is_no_finished_request(instances: Any, bounds: EngineLimits) -> None:
    p = instances(bounds)
    p.peer.want(range(10))
    drain(p.engine)
    counters = p.engine.counters
    assert (p.log.events, counters.generated_tokens, counters.prefill_tokens) == ({}, 0, 10)
    assert not any(counters.finished.values())
    p.peer.sent()
    drain(p.engine)
    assert p.ends == {ExportEnd.SENT: 1}


@BOUNDS
def test_its_pages_are_leased_until_they_are_sent_and_cached_after_that(instances: Any, bounds: EngineLimits) -> None:
    p = instances(bounds)
    p.peer.want(range(10))
    drain(p.engine)
    assert (p.lent, p.engine.load().free_pages, p.engine.load().running) == (3, 61, 0)
    p.serve(request("same", range(10), max_tokens=1))
    assert p.log.events["same"][0].cached_tokens == 2 * PAGE
    p.peer.sent()
    drain(p.engine)
    assert (p.lent, p.engine.load().free_pages) == (0, 64)


@BOUNDS
def test_others_go_on_beside_exports_with_their_own_tokens(instances: Any, bounds: EngineLimits) -> None:
    p = instances(bounds)
    news = [request(f"r{i}", [i] * 9, max_tokens=12) for i in range(3)]
    p.serve(news[0])
    for serial in range(3):
        p.peer.want([serial + 9] * 17, handoff=HandoffId(77, serial))
        p.engine.submit(news[serial]) if serial else None
    drain(p.engine)
    p.assert_right(*news)
    for serial in range(3):
        p.peer.events.append(Sent(HandoffId(77, serial), complete=True))
    drain(p.engine)
    assert p.ends == {ExportEnd.SENT: 3}


def test_an_export_and_a_prompt_share_a_job(instances: Any) -> None:
    p = instances(fixed(2))
    p.engine.submit(new := request("r", [1] * 9))
    p.peer.want([2] * 9)
    drain(p.engine)
    p.assert_right(new)
    assert [tokens for _, tokens in p.peer.reports] == [range(9)] * 4
    p.peer.sent()
    drain(p.engine)


def test_an_export_is_due_when_its_handoff_is(instances: Any) -> None:
    p = instances(fixed(2))
    p.clock.sleep(3.0)
    p.peer.want(range(10), deadline=5.0)
    p.engine.step()
    assert [r.ttft_deadline_s for r in p.engine._scheduler.prefilling] == [5.0]
    drain(p.engine)
    p.peer.sent()
    drain(p.engine)


def test_a_short_prompt_for_a_peer_passes_a_long_one_that_would_make_it_late(instances: Any) -> None:
    objectives = MultiplexConfig(itl_s=1.0, ttft_s=0.05, ttft_s_per_token=0.02)
    p, short = instances(limits(mode=Mode.TIME_SHARED, multiplex=objectives), runner=device), HandoffId(77, 1)
    p.peer.want([1] * 30)
    p.engine.step()
    p.peer.want([2] * 3, handoff=short)
    drain(p.engine)
    assert (p.peer.order[0], p.peer.order[-1]) == (WANTED, WANTED)
    assert short in p.peer.order
    for handoff in (WANTED, short):
        p.peer.events.append(Sent(handoff, complete=True))
    drain(p.engine)


@BOUNDS
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_export_that_nobody_wants_any_more_is_gone_and_its_pages_stay_until_they_are_read_no_more(
    instances: Any, bounds: EngineLimits, steps: int
) -> None:
    p = instances(bounds)
    p.serve(reader := request("reader", max_tokens=30))
    p.peer.want([2] * 30)
    for _ in range(steps):
        p.engine.step()
    reports = len(p.peer.reports)
    p.peer.unwant()
    p.engine.step()
    assert export_id(WANTED) not in p.engine._scheduler.requests
    lent = -(-30 // PAGE) if p.peer.reports or steps else 0
    drain(p.engine)
    assert p.lent == lent
    p.peer.sent(complete=False)
    drain(p.engine)
    assert (len(p.peer.reports), p.peer.said_failed) == (reports, [])
    assert p.ends == {ExportEnd.UNWANTED: 1}
    p.assert_right(reader)


def test_after_a_lost_connection_an_export_ends_by_what_was_sent_alone(instances: Any) -> None:
    p = instances(fixed(2))
    p.serve(reader := request("reader", max_tokens=30))
    p.peer.want([2] * 30)
    p.engine.step()
    p.peer.sent(complete=False)
    drain(p.engine)
    p.assert_right(reader)


def test_a_pass_is_given_up_when_nobody_wants_what_it_prefills(instances: Any) -> None:
    runner = InterruptedRunner(clock := VirtualClock())
    p = instances(limits(), runner=lambda _: runner, clock=clock)
    p.peer.want([2] * 30)
    runner.interrupt = p.peer.unwant
    drain(p.engine)
    assert (runner.given_up, p.peer.reports) == (1, [])
    assert clock.now() < 0.1
    p.peer.sent(complete=False)
    drain(p.engine)


def test_a_long_pass_goes_on_listening(instances: Any) -> None:
    runner = InterruptedRunner(clock := VirtualClock())
    p = instances(limits(), runner=lambda _: runner, clock=clock)
    p.engine.submit(new := request("r", [1] * 30))
    waiting: list[int] = []

    def poll() -> Sequence[Any]:
        waiting.append(p.engine.load().waiting)
        return Peer.poll(p.peer)

    p.peer.poll = poll
    runner.interrupt = lambda: p.peer.want([2] * 8)
    p.engine.step()
    assert (len(waiting) > 10, waiting[-1]) == (True, 1)
    drain(p.engine)
    p.assert_right(new)
    p.peer.sent()
    drain(p.engine)


@pytest.mark.parametrize("tokens", [[1] * 64, [VOCAB], []], ids=["too long", "no token of this model", "nothing"])
def test_what_this_instance_cannot_compute_is_refused(instances: Any, tokens: list[int]) -> None:
    p = instances()
    p.peer.want(tokens)
    assert not p.engine.step()
    assert p.peer.said_failed == [WANTED]
    p.peer.sent(complete=False)
    p.engine.step()
    assert p.ends == {ExportEnd.REFUSED: 1}


def test_a_full_queue_refuses_exports_as_it_does_requests(instances: Any) -> None:
    p = instances(limits(max_waiting=1))
    p.engine.submit(request("r"))
    p.peer.want(range(10))
    drain(p.engine)
    assert p.peer.said_failed == [WANTED]
    p.peer.sent(complete=False)
    p.engine.step()


def test_an_export_past_its_deadline_fails(instances: Any) -> None:
    p = instances(limits(max_batch=1))
    p.serve(request("reader", max_tokens=60))
    p.peer.want(range(10), deadline=0.3)
    drain(p.engine)
    assert (p.peer.said_failed, p.peer.reports) == ([WANTED], [])
    p.peer.sent(complete=False)
    p.engine.step()
    assert p.ends == {ExportEnd.FAILED: 1}


def fails_at_once(clock: Clock) -> Runner:
    return FailingRunner(clock, failing_step=1)


def fails_with_its_block(clock: Clock) -> Runner:
    return BlockFails(64, PAGE, 0.01, 0.001, clock, vocab_size=VOCAB)


@pytest.mark.parametrize(("bounds", "runner"), [(limits(), fails_at_once), (fixed(3), fails_with_its_block)])
def test_an_export_that_the_device_fails_on_is_told_as_failed_and_its_pages_stay_until_they_are_read_no_more(
    instances: Any, bounds: EngineLimits, runner: Any
) -> None:
    p = instances(bounds, runner=runner)
    p.peer.want(range(10))
    drain(p.engine)
    assert (p.peer.said_failed, p.log.events, p.lent) == ([WANTED], {}, 3)
    p.peer.sent(complete=False)
    drain(p.engine)
    assert (p.ends, p.engine.load().free_pages) == ({ExportEnd.FAILED: 1}, 64)


@pytest.mark.parametrize("bounds", [limits(mode=Mode.CHUNKED), fixed(3)], ids=["chunked", "split"])
def test_an_export_is_never_preempted(instances: Any, bounds: EngineLimits) -> None:
    others_were = 0
    for pages in range(11, 16):
        p = instances(bounds, pages=pages)
        p.serve(old := request("old", [3] * 15, max_tokens=30))
        p.serve(new := request("new", [4] * 7, max_tokens=30))
        p.peer.want([5] * 20)
        before = 0
        while p.engine.step():
            if export_id(WANTED) in p.engine._scheduler.requests and p.engine._scheduler.prefilling:
                others_were += p.engine.counters.preemptions - before
            before = p.engine.counters.preemptions
        p.peer.sent()
        drain(p.engine)
        p.assert_right(old, new)
        assert p.ends == {ExportEnd.SENT: 1}
    assert others_were > 0


def test_who_cannot_grow_waits_for_pages_that_are_leased(instances: Any) -> None:
    p = instances(pages=11)
    p.serve(old := request("old", [3] * 15, max_tokens=20))
    p.peer.want([5] * 24)
    drain(p.engine)
    told = len(p.log.tokens("old"))
    assert told < 20
    p.peer.sent()
    drain(p.engine)
    p.assert_right(old)


def test_closing_fails_the_exports_that_are_not_computed(instances: Any) -> None:
    p = instances(fixed(2))
    p.peer.want([2] * 30)
    p.engine.step()
    p.engine.close()
    assert (p.peer.said_failed, p.log.events) == ([WANTED], {})
    p.peer.sent(complete=False)
    p.engine._handoffs.listen()
    p.engine._handoffs.act(p.engine._scheduler, 0.0)


def test_a_breach_tells_no_client_of_an_export(worlds: Worlds) -> None:
    clock, log, peer = VirtualClock(), Log(), Peer()
    engine = Engine(StrictRunner(64, PAGE, 0.01, 0.0, clock, vocab_size=VOCAB), limits(), log, clock, port=peer)
    peer.want(range(10))
    engine._handoffs.listen()
    engine._pool.release = lambda pages: 1 / 0  # type: ignore[assignment, method-assign]
    engine.submit(request("r"))
    engine._scheduler.add(next(iter(engine._loop._inbox.values())))
    engine.close()
    assert set(log.events) == {"r"}
