"""Whole schedules: whatever runs beside a request, it gets the tokens that it would get alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.engine.engine import Engine
from pdmux_ray.types import ONE_PASS_MODES, FinishReason, Mode, NewRequest
from tests.examples import tried

from .world import PAGE, Log, Worlds, expected, limits, request

MODES = pytest.mark.parametrize("mode", ONE_PASS_MODES)


def drain(engine: Engine) -> None:
    steps = 0
    while engine.step():
        engine.check_integrity()
        steps += 1
        assert steps < 5_000, "the engine makes no progress"
    assert not getattr(engine._runner, "_jobs", None), "the device was not told that a job has ended"


def run_and_check(worlds: Worlds, requests: list[NewRequest], pages: int = 64, **changes: object) -> Engine:
    """Runs requests together and checks each one's tokens."""
    bounds = limits(**changes)
    engine, log = worlds(bounds, pages)
    for new in requests:
        engine.submit(new)
    drain(engine)
    for new in requests:
        assert (log.tokens(new.request_id), log.finish(new.request_id)) == expected(new, engine.limits)
    return engine


@MODES
def test_a_preempted_request_resumes_with_the_same_tokens(worlds: Worlds, mode: Mode) -> None:
    requests = [request(f"r{i}", [i] * 10, max_tokens=30, seed=i) for i in range(4)]
    engine = run_and_check(worlds, requests, pages=20, mode=mode)
    assert engine.counters.preemptions > 0


@MODES
def test_requests_that_share_a_prompt_and_are_preempted_keep_their_tokens(worlds: Worlds, mode: Mode) -> None:
    requests = [request(f"r{i}", [1] * 17, max_tokens=30, seed=i) for i in range(6)]
    engine = run_and_check(worlds, requests, pages=16, mode=mode)
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_hit_tokens > 0


@MODES
def test_a_pool_that_holds_one_request_serves_them_one_by_one(worlds: Worlds, mode: Mode) -> None:
    run_and_check(worlds, [request(f"r{i}", [i] * 20, max_tokens=12) for i in range(5)], pages=8, mode=mode)


@pytest.mark.parametrize("chunk_tokens", [1, 3, PAGE, 7, 100])
def test_a_chunk_of_any_size_gives_the_same_tokens(worlds: Worlds, chunk_tokens: int) -> None:
    requests = [request(f"r{i}", range(10 + i), max_tokens=10) for i in range(5)]
    run_and_check(worlds, requests, mode=Mode.CHUNKED, chunk_tokens=chunk_tokens)


def test_a_prompt_aborted_half_way_leaves_only_computed_pages_in_the_prefix_cache(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.CHUNKED, chunk_tokens=6))
    engine.submit(request("first", [1] * 40))
    engine.step()
    engine.step()
    engine.abort(["first"])
    second = request("second", [1] * 40)
    engine.submit(second)
    drain(engine)
    assert log.events["second"][0].cached_tokens == 12
    assert log.tokens("second") == expected(second, engine.limits)[0]


def test_pages_that_a_request_finds_again_after_a_preemption_are_not_reported_as_cached(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.CHUNKED, chunk_tokens=5), pages=12)
    engine.submit(request("old", [1] * 4, max_tokens=20))
    engine.step()
    engine.submit(request("new", [2] * 39))
    drain(engine)
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_hit_tokens > 0
    assert log.events["new"][0].cached_tokens == 0


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.CHUNKED, chunk_tokens=5))
    engine.submit(request("short", [1], max_tokens=12))
    engine.step()
    engine.submit(request("long", [2] * 40))
    for _ in range(10):
        engine.step()
    assert (len(log.tokens("short")), len(log.tokens("long"))) == (11, 1)


def test_prefill_first_stops_the_decodes_for_one_step(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.PREFILL_FIRST))
    engine.submit(request("short", [1], max_tokens=12))
    engine.step()
    engine.submit(request("long", [2] * 40))
    engine.step()
    assert (len(log.tokens("short")), len(log.tokens("long"))) == (1, 1)
    engine.step()
    assert (len(log.tokens("short")), len(log.tokens("long"))) == (2, 2)


def test_requests_get_their_first_token_in_order_of_arrival(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.CHUNKED, max_batch=2), pages=16)
    names = [f"r{i}" for i in range(8)]
    for index, name in enumerate(names):
        engine.submit(request(name, range(1 + 7 * index % 40), max_tokens=3))
    drain(engine)
    assert list(log.events) == names


@dataclass(frozen=True)
class Arrival:
    step: int
    new: NewRequest
    abort_after: int | None  # steps from its arrival


@st.composite
def arrivals(draw: st.DrawFn, last_step: int = 40) -> list[Arrival]:
    made = []
    for index in range(draw(st.integers(1, 8))):
        max_tokens = draw(st.integers(1, 25))
        new = request(
            f"r{index}",
            [draw(st.sampled_from([1, 2])) for _ in range(draw(st.integers(0, 3)))] + [3] * draw(st.integers(1, 36)),
            sink=draw(st.sampled_from("ab")),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            seed=draw(st.integers(0, 3)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 49), max_size=2))),
        )
        abort_after = draw(st.one_of(st.none(), st.integers(0, 30)))
        made.append(Arrival(draw(st.integers(0, last_step)), new, abort_after if draw(st.integers(0, 3)) == 0 else None))
    return made


@settings(max_examples=tried(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=arrivals(),
    mode=st.sampled_from(ONE_PASS_MODES),
    pages=st.integers(10, 40),
    chunk_tokens=st.integers(1, 40),
    max_batch=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_any_schedule_gives_every_request_its_own_tokens_and_exactly_one_end(
    schedule: list[Arrival], mode: Mode, pages: int, chunk_tokens: int, max_batch: int, prefix_cache: bool
) -> None:
    worlds = Worlds()
    bounds = limits(mode=mode, chunk_tokens=chunk_tokens, max_batch=max_batch, prefix_cache=prefix_cache, context_length=40)
    engine, log = worlds(bounds, pages)
    play(schedule, engine, log)
    worlds.close()


def play(schedule: list[Arrival], engine: Engine, log: Log) -> None:
    """Runs a schedule and checks each request's tokens and end."""
    for step in range(80):
        for arrival in schedule:
            if arrival.step == step:
                engine.submit(arrival.new)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort([arrival.new.request_id])
        engine.step()
        engine.check_integrity()
    drain(engine)
    check_ends(schedule, engine, log)


def check_ends(schedule: list[Arrival], engine: Engine, log: Log) -> None:
    for arrival in schedule:
        tokens, finish = expected(arrival.new, engine.limits)
        got = log.tokens(arrival.new.request_id)
        if log.finish(arrival.new.request_id) is FinishReason.ABORT:
            assert arrival.abort_after is not None
            assert got == tokens[: len(got)]
        else:
            assert (got, log.finish(arrival.new.request_id)) == (tokens, finish)
