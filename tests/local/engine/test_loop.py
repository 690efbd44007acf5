"""The step loop in its own thread, and what it does when something breaks."""

from __future__ import annotations

import random
import threading
import time

import pytest

from pdmux_ray.clock import Clock, VirtualClock, WallClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import Runner
from pdmux_ray.errors import InstanceUnavailableError, IntegrityError, PdmuxError, QueueFullError
from pdmux_ray.types import ONE_PASS_MODES, FinishReason, Mode, NewRequest, TokenEvent
from tests.unit.engine.runners import FailingRunner, GatedRunner, InterruptedRunner, LyingRunner, SlowRunner, VandalRunner
from tests.unit.engine.world import PAGE, VOCAB, Log, StrictRunner, Worlds, expected, limits, request


class CountingClock(WallClock):
    reads = 0

    def now(self) -> float:
        self.reads += 1
        return super().now()


def fast(clock: Clock) -> Runner:
    return StrictRunner(24, PAGE, 0.0, 0.0, clock, vocab_size=VOCAB)


@pytest.mark.parametrize("mode", [*ONE_PASS_MODES, Mode.SPLIT, Mode.TIME_SHARED])
def test_many_threads_can_submit_and_abort_while_the_loop_runs(worlds: Worlds, mode: Mode) -> None:
    multiplex = MultiplexConfig(policy="fixed", block_layers=3)
    engine, log = worlds(limits(mode=mode, max_waiting=20, multiplex=multiplex), runner=fast, clock=WallClock())
    engine.start()
    sent: list[NewRequest] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        for index in range(40):
            new = request(
                f"{number}-{index}", [rng.randrange(3)] * rng.randrange(1, 30), max_tokens=rng.randrange(1, 20), seed=index
            )
            submit_patiently(engine, new)
            sent.append(new)
            if rng.random() < 0.3:
                engine.abort([rng.choice(sent).request_id])

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert len(sent) == 160
    log.wait_for_ends([new.request_id for new in sent])
    for new in sent:
        tokens, finish = expected(new, engine.limits)
        got = log.tokens(new.request_id)
        if log.finish(new.request_id) is FinishReason.ABORT:
            assert got == tokens[: len(got)]
        else:
            assert (got, log.finish(new.request_id)) == (tokens, finish)


def submit_patiently(engine: Engine, new: NewRequest) -> None:
    while True:
        try:
            return engine.submit(new)
        except QueueFullError:
            time.sleep(0.001)


@pytest.mark.parametrize("mode", ONE_PASS_MODES)
def test_a_prefill_is_given_up_when_its_request_is_aborted_and_the_others_go_on(worlds: Worlds, mode: Mode) -> None:
    runner = InterruptedRunner(clock := VirtualClock())
    engine, log = worlds(limits(mode=mode), runner=lambda _: runner, clock=clock)
    stays = request("stays", max_tokens=6)
    engine.submit(stays)
    engine.step()
    engine.submit(request("goes", [1] * 20, max_tokens=6))
    before_s = clock.now()
    runner.interrupt = lambda: engine.abort(["goes"])
    engine.step()
    assert runner.given_up == 1
    assert clock.now() - before_s < 0.1
    while engine.step():
        pass
    assert (log.tokens("goes"), log.finish("goes")) == ([], FinishReason.ABORT)
    assert (log.tokens("stays"), log.finish("stays")) == expected(stays, engine.limits)


def test_an_abort_of_a_request_outside_the_step_does_not_wait_for_a_long_prefill(worlds: Worlds) -> None:
    runner = InterruptedRunner(clock := VirtualClock())
    engine, log = worlds(limits(mode=Mode.PREFILL_FIRST), runner=lambda _: runner, clock=clock)
    engine.submit(request("decoding", max_tokens=6))
    engine.step()
    engine.submit(long := request("long", [1] * 20, max_tokens=3))
    free_before = engine.load().free_pages

    def interrupt() -> None:
        engine.abort(["decoding"])

    runner.interrupt = interrupt
    engine.step()
    assert runner.given_up == 0
    assert log.finish("decoding") is FinishReason.ABORT
    assert engine.load().free_pages == free_before + 1 - -(-20 // PAGE)
    while engine.step():
        pass
    assert (log.tokens("long"), log.finish("long")) == expected(long, engine.limits)


def test_a_step_goes_on_when_only_one_of_its_prefills_is_aborted(worlds: Worlds) -> None:
    runner = InterruptedRunner(clock := VirtualClock())
    engine, log = worlds(limits(mode=Mode.PREFILL_FIRST), runner=lambda _: runner, clock=clock)
    engine.submit(first := request("first", [1] * 8, max_tokens=3))
    engine.submit(request("second", [2] * 8, max_tokens=3))
    runner.interrupt = lambda: engine.abort(["second"])
    while engine.step():
        pass
    assert runner.given_up == 0
    assert log.finish("second") is FinishReason.ABORT
    assert (log.tokens("first"), log.finish("first")) == expected(first, engine.limits)


def test_an_abort_during_a_step_takes_effect_when_that_step_ends(worlds: Worlds) -> None:
    runner = GatedRunner(WallClock())
    engine, log = worlds(runner=lambda _: runner, clock=WallClock())
    engine.start()
    engine.submit(request("r", max_tokens=50))
    assert runner.entered.acquire(timeout=60)
    engine.abort(["r"])
    runner.gate.release()
    log.wait_for_ends(["r"])
    assert (len(log.tokens("r")), log.finish("r")) == (1, FinishReason.ABORT)
    assert engine.load().free_pages == 64


def test_an_idle_loop_sleeps_and_wakes_for_a_request(worlds: Worlds) -> None:
    clock = CountingClock()
    engine, log = worlds(runner=fast, clock=clock)
    engine.start()
    for name in ("first", "second"):
        engine.submit(request(name))
        log.wait_for_ends([name])
        while engine.load().step_age_s:
            time.sleep(0.001)
        reads = clock.reads
        time.sleep(0.02)
        assert clock.reads == reads


def test_closing_ends_what_runs_and_what_waits(worlds: Worlds) -> None:
    engine, log = worlds(
        limits(max_batch=1, context_length=250), runner=lambda c: StrictRunner(64, PAGE, 0.01, 0.0, c), clock=WallClock()
    )
    engine.start()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=200))
    log.wait_for_tokens("running", 1)
    engine.close()
    assert [log.finish(name) for name in ("running", "waiting")] == [FinishReason.ERROR] * 2
    assert log.error("running") == (
        "InstanceUnavailableError",
        "The instance that served this request was closed. Send it again.",
    )


def test_closing_during_a_step_that_does_not_end_says_so_and_can_be_tried_again(worlds: Worlds) -> None:
    runner = GatedRunner(WallClock())
    engine, log = worlds(limits(stall_timeout_s=0.01), runner=lambda _: runner, clock=WallClock())
    engine.start()
    engine.submit(request("r"))
    assert runner.entered.acquire(timeout=60)
    with pytest.raises(PdmuxError, match="did not end within") as refused:
        engine.close()
    assert type(refused.value) is PdmuxError
    runner.gate.release()
    log.wait_for_ends(["r"])
    engine.close()


def test_an_engine_that_never_got_a_request_closes(worlds: Worlds) -> None:
    engine, _ = worlds(clock=WallClock())
    engine.start()
    engine.close()
    assert engine.problem() == "the engine is closed"


def test_a_step_that_fails_on_the_device_ends_its_requests_and_the_engine_goes_on(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    engine, log = worlds(limits(max_batch=2), runner=lambda clock: FailingRunner(clock, failing_step=3))
    for name in ("a", "b", "c"):
        engine.submit(request(name))
    while engine.step():
        engine.check_integrity()
    assert [log.finish(name) for name in "abc"] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert "RuntimeError: out of memory" in caplog.text
    assert log.error("a") == ("PdmuxError", "The device failed while it computed this request. Try again.")
    assert len(log.tokens("a")) == 2
    assert log.tokens("c") == expected(request("c"), engine.limits)[0]
    assert engine.problem() is None


def test_a_step_that_fails_before_a_prompt_is_computed_leaves_nothing_in_the_prefix_cache(worlds: Worlds) -> None:
    engine, log = worlds(runner=lambda clock: FailingRunner(clock, failing_step=1))
    for name in ("a", "b"):
        engine.submit(request(name, [1] * 4 * PAGE))
        while engine.step():
            pass
    assert log.finish("a") is FinishReason.ERROR
    assert log.events["b"][0].cached_tokens == 0


def test_a_broken_invariant_stops_the_engine_loudly(worlds: Worlds, caplog: pytest.LogCaptureFixture) -> None:
    engine, log = worlds(runner=lambda clock: LyingRunner(64, PAGE, 0.0, 0.0, clock, vocab_size=VOCAB), clock=WallClock())
    engine.start()
    engine.submit(request("r"))
    log.wait_for_ends(["r"])
    assert log.error("r") == ("InstanceUnavailableError", "The instance that served this request failed. Send it again.")
    assert "answered with 2 tokens" in (engine.problem() or "")
    assert "invariant" in caplog.text
    with pytest.raises(InstanceUnavailableError, match="broken"):
        engine.submit(request("late"))


def test_requests_are_told_once_even_when_their_pages_cannot_be_freed() -> None:
    clock, log = VirtualClock(), Log()
    engine = Engine(VandalRunner(64, PAGE, 0.0, 0.0, clock, vocab_size=VOCAB), limits(), log, clock)
    for name in ("a", "b", "c"):
        engine.submit(request(name, max_tokens=1))
    with pytest.raises(IntegrityError, match="does not hold"):
        engine.step()
    engine.close()
    engine.close()
    assert [[event.finish for event in log.events[name]] for name in "abc"] == [[FinishReason.ERROR]] * 3


def test_the_integrity_check_sees_a_page_that_no_request_holds() -> None:
    clock = VirtualClock()
    engine = Engine(fast(clock), limits(), Log(), clock)
    engine._pool.take(1)
    with pytest.raises(IntegrityError, match="holders differ"):
        engine.check_integrity()
    engine.close()


def test_a_broken_invariant_reaches_who_steps_by_hand(worlds: Worlds) -> None:
    engine, _ = worlds(runner=lambda clock: LyingRunner(64, PAGE, 0.0, 0.0, clock, vocab_size=VOCAB))
    engine.submit(request("r"))
    with pytest.raises(IntegrityError, match="answered with 2 tokens"):
        engine.step()


def test_a_stalled_step_makes_the_engine_unhealthy_until_it_ends(worlds: Worlds) -> None:
    runner = SlowRunner(64, PAGE, 0.0, 0.0, VirtualClock(), vocab_size=VOCAB)
    engine, _ = worlds(runner=lambda _: runner, clock=runner._clock)
    runner.ask = lambda: f"{engine.problem()}; defect: {engine.defect()}"
    engine.submit(request("r", max_tokens=1))
    engine.step()
    assert runner.answer == "the step under way has taken 31.0 s, more than 30.0 s; defect: None"
    engine.step()
    assert engine.problem() is None


def test_a_sink_that_fails_loses_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    clock, log = VirtualClock(), Log()

    def publish(sink: str, events: list[TokenEvent]) -> None:
        if sink == "gone":
            raise ConnectionError("nobody listens")
        log(sink, events)

    bounds: EngineLimits = limits()
    engine = Engine(StrictRunner(64, PAGE, 0.01, 0.0, clock, vocab_size=VOCAB), bounds, publish, clock)
    engine.submit(request("lost", sink="gone", max_tokens=40))
    engine.submit(request("kept", sink="here"))
    steps = 0
    while engine.step():
        engine.check_integrity()
        steps += 1
    assert steps == 5  # "kept" needs five; "lost" would have needed forty
    assert log.tokens("kept") == expected(request("kept"), bounds)[0]
    assert "nobody listens" in caplog.text
    engine.close()


def test_a_sink_that_fails_amid_a_prefill_loses_its_requests_only_after_the_step(caplog: pytest.LogCaptureFixture) -> None:
    clock, log = VirtualClock(), Log()
    runner = InterruptedRunner(clock)
    broken_sinks: set[str] = set()

    def publish(sink: str, events: list[TokenEvent]) -> None:
        if sink in broken_sinks:
            raise ConnectionError("nobody listens")
        log(sink, events)

    engine = Engine(runner, limits(mode=Mode.PREFILL_FIRST), publish, clock)
    engine.submit(request("decoding", sink="gone", max_tokens=20))
    engine.step()
    engine.submit(request("prefilled", [1] * 20, sink="gone", max_tokens=20))
    engine.submit(kept := request("kept", [2] * 8, sink="here"))

    def interrupt() -> None:
        broken_sinks.add("gone")
        engine.abort(["decoding"])

    runner.interrupt = interrupt
    while engine.step():
        engine.check_integrity()
    assert "nobody listens" in caplog.text
    assert log.tokens("prefilled") == []
    assert (log.tokens("kept"), log.finish("kept")) == expected(kept, engine.limits)
    assert engine.load().free_pages == 64
    engine.close()


def test_load_counts_requests_pages_and_steps(worlds: Worlds) -> None:
    engine, _ = worlds(limits(max_batch=1), pages=64)
    for name in "abc":
        engine.submit(request(name, [1] * 2 * PAGE))
    assert (engine.load().running, engine.load().waiting) == (0, 3)
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.free_pages, load.total_pages, load.steps) == (1, 2, 62, 64, 1)


def test_load_counts_what_decodes_and_what_is_to_be_prefilled_without_what_the_cache_has(worlds: Worlds) -> None:
    engine, _ = worlds(limits(mode=Mode.CHUNKED, max_batch=2))
    assert work(engine) == (0, 0, 0)
    engine.submit(request("a", range(10)))
    assert work(engine) == (0, 0, 10)
    engine.step()
    assert work(engine) == (0, 0, 2)
    engine.step()
    assert work(engine) == (1, 11, 0)
    engine.submit(request("b", range(20)))
    engine.submit(request("c", range(20)))
    engine.step()  # 7 tokens beside the decode
    assert work(engine) == (1, 12, (20 - 2 * PAGE - 7) + (20 - 2 * PAGE))


def work(engine: Engine) -> tuple[int, int, int]:
    load = engine.load()
    return load.decoding, load.decode_context_tokens, load.queued_prefill_tokens
