"""One request at a time: what it generates, when it ends, what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import fake_token
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.request import Request
from pdmux_ray.errors import ContextLengthError, IllegalMoveError, InstanceUnavailableError, QueueFullError, RequestError
from pdmux_ray.types import FinishReason, Mode, NewRequest, Phase, TokenEvent

from .world import EOS, PAGE, VOCAB, Log, StrictRunner, Worlds, expected, limits, request


def drain(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def generated(new: NewRequest, worlds: Worlds, bounds: EngineLimits | None = None) -> tuple[list[int], FinishReason | None]:
    engine, log = worlds(bounds)
    engine.submit(new)
    drain(engine)
    return log.tokens(new.request_id), log.finish(new.request_id)


def seed_whose_nth_token_is(token: int, place: int, prompt: tuple[int, ...] = (1, 2, 3)) -> int:
    """A seed for which `token` comes at `place` (from 1) and not before."""
    for seed in range(100_000):
        tokens, _ = expected(request("r", prompt, max_tokens=place, seed=seed), limits())
        if tokens.index(token) == place - 1 if token in tokens else False:
            return seed
    raise AssertionError("no such seed")


def test_it_ends_after_max_tokens(worlds: Worlds) -> None:
    tokens, finish = generated(request("r", max_tokens=9), worlds)
    assert (len(tokens), finish) == (9, FinishReason.LENGTH)


def test_a_single_token_can_be_asked_for(worlds: Worlds) -> None:
    tokens, finish = generated(request("r", max_tokens=1), worlds)
    assert (tokens, finish) == ([fake_token(0, [1, 2, 3], VOCAB)], FinishReason.LENGTH)


def test_it_ends_at_the_context_length(worlds: Worlds) -> None:
    tokens, finish = generated(request("r", [1] * 60, max_tokens=1000), worlds, limits(context_length=64))
    assert (len(tokens), finish) == (4, FinishReason.LENGTH)


def test_an_end_of_sequence_token_ends_it_and_is_told(worlds: Worlds) -> None:
    seed = seed_whose_nth_token_is(EOS, 3)
    tokens, finish = generated(request("r", seed=seed, max_tokens=20, ignore_eos=False), worlds)
    assert (len(tokens), tokens[-1], finish) == (3, EOS, FinishReason.STOP)


def test_ignore_eos_goes_past_the_end_of_sequence_token(worlds: Worlds) -> None:
    seed = seed_whose_nth_token_is(EOS, 3)
    tokens, finish = generated(request("r", seed=seed, max_tokens=20), worlds)
    assert (len(tokens), finish) == (20, FinishReason.LENGTH)


def test_a_stop_token_id_ends_it_even_when_eos_is_ignored(worlds: Worlds) -> None:
    seed = seed_whose_nth_token_is(33, 2)
    tokens, finish = generated(request("r", seed=seed, max_tokens=20, stop_token_ids=(33,)), worlds)
    assert (len(tokens), finish) == (2, FinishReason.STOP)


@pytest.mark.parametrize(("min_tokens", "stops"), [(2, True), (3, False)])
def test_a_stop_token_counts_only_after_min_tokens(worlds: Worlds, min_tokens: int, stops: bool) -> None:
    seed = seed_whose_nth_token_is(33, 3)
    new = request("r", seed=seed, max_tokens=20, min_tokens=min_tokens, stop_token_ids=(33,))
    tokens, _ = generated(new, worlds)
    assert (len(tokens) == 3) is stops


def test_a_stop_token_at_max_tokens_is_a_stop(worlds: Worlds) -> None:
    seed = seed_whose_nth_token_is(33, 3)
    assert generated(request("r", seed=seed, max_tokens=3, stop_token_ids=(33,)), worlds)[1] is FinishReason.STOP


def test_logprobs_come_with_the_tokens_of_those_who_asked(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("with", logprobs=2))
    engine.submit(request("without"))
    drain(engine)
    for event in log.events["with"]:
        assert event.logprobs is not None
        assert len(event.logprobs.top) == 2
    assert all(event.logprobs is None for event in log.events["without"])


def test_each_sink_gets_its_own_requests_once_a_step() -> None:
    calls: list[tuple[str, list[str]]] = []
    clock = VirtualClock()
    runner = StrictRunner(64, PAGE, 0.01, 0.0, clock, vocab_size=VOCAB)
    engine = Engine(runner, limits(), lambda sink, events: calls.append((sink, [e.request_id for e in events])), clock)
    for name, sink in (("a", "left"), ("b", "right"), ("c", "left")):
        engine.submit(request(name, sink=sink))
    engine.step()
    assert calls == [("left", ["a", "c"]), ("right", ["b"])]
    engine.close()


def test_the_second_of_two_equal_prompts_computes_only_its_last_page(worlds: Worlds) -> None:
    engine, log = worlds()
    prompt = list(range(4 * PAGE))
    for name in ("first", "second"):
        engine.submit(request(name, prompt))
        drain(engine)
    assert [log.events[name][0].cached_tokens for name in ("first", "second")] == [0, 3 * PAGE]
    assert log.tokens("first") == log.tokens("second")
    assert engine.counters.prefix_hit_tokens == 3 * PAGE


def test_generated_pages_are_found_by_a_follow_up_prompt(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("first", [1] * PAGE, max_tokens=2 * PAGE + 1))
    drain(engine)
    engine.submit(request("second", [1] * PAGE + log.tokens("first"), max_tokens=1))
    drain(engine)
    assert log.events["second"][0].cached_tokens == 3 * PAGE


def test_without_a_prefix_cache_nothing_is_found(worlds: Worlds) -> None:
    engine, log = worlds(limits(prefix_cache=False))
    for name in ("a", "b"):
        engine.submit(request(name, [1] * 4 * PAGE))
        drain(engine)
    assert [log.events[name][0].cached_tokens for name in "ab"] == [0, 0]


def test_a_running_request_is_aborted_before_the_next_step_and_its_pages_are_free(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("r", max_tokens=50))
    engine.step()
    engine.step()
    engine.abort(["r", "r", "unknown"])
    assert not engine.step()
    assert (len(log.tokens("r")), log.finish("r")) == (2, FinishReason.ABORT)
    assert engine.load().free_pages == engine.load().total_pages


def test_a_request_can_be_aborted_before_the_engine_has_seen_it(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("r"))
    engine.abort(["r"])
    drain(engine)
    assert (log.tokens("r"), log.finish("r")) == ([], FinishReason.ABORT)


def test_an_abort_while_a_prompt_is_half_computed_frees_its_pages(worlds: Worlds) -> None:
    engine, log = worlds(limits(mode=Mode.CHUNKED, chunk_tokens=5))
    engine.submit(request("r", [1] * 40))
    engine.step()
    engine.abort(["r"])
    drain(engine)
    assert (log.tokens("r"), log.finish("r")) == ([], FinishReason.ABORT)


def test_a_request_past_its_deadline_fails_in_any_phase(worlds: Worlds) -> None:
    engine, log = worlds(limits(max_batch=1))
    for name in ("running", "waiting"):
        engine.submit(replace(request(name, max_tokens=60), deadline_s=0.3))
    drain(engine)
    for name in ("running", "waiting"):
        assert log.finish(name) is FinishReason.ERROR
        kind, message = log.error(name)
        assert kind == "DeadlineError"
        assert "deadline" in (message or "")
    assert 0 < len(log.tokens("running")) < 60
    assert log.tokens("waiting") == []


def test_an_empty_prompt_is_refused(worlds: Worlds) -> None:
    engine, _ = worlds()
    with pytest.raises(RequestError, match="empty"):
        engine.submit(request("r", []))


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(worlds: Worlds) -> None:
    engine, _ = worlds(limits(context_length=64))
    with pytest.raises(ContextLengthError, match=r"64 tokens.* 64 tokens"):
        engine.submit(request("r", [1] * 64))
    engine.submit(request("r", [1] * 63))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_token_ids_outside_the_vocabulary_are_refused(worlds: Worlds, token: int) -> None:
    engine, _ = worlds()
    with pytest.raises(RequestError, match=f"Token id {token} ") as prompt_error:
        engine.submit(request("r", [1, token]))
    with pytest.raises(RequestError, match=f"Token id {token} ") as stop_error:
        engine.submit(request("r", stop_token_ids=(token,)))
    assert (prompt_error.value.param, stop_error.value.param) == ("prompt", "stop_token_ids")


def test_an_id_in_use_is_refused_and_can_be_used_again_later(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("r"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("r"))
    drain(engine)
    log.events.clear()
    engine.submit(request("r"))
    drain(engine)
    assert log.finish("r") is FinishReason.LENGTH


def test_a_full_queue_refuses_and_says_when_to_come_back(worlds: Worlds) -> None:
    engine, _ = worlds(limits(max_waiting=2))
    for name in "ab":
        engine.submit(request(name))
    with pytest.raises(QueueFullError, match="2 requests are waiting") as refused:
        engine.submit(request("c"))
    assert refused.value.retry_after_s == 1.0


def test_the_retry_time_follows_the_recent_rate_of_finished_requests(worlds: Worlds) -> None:
    engine, _ = worlds(limits(max_waiting=50, max_batch=1))
    for i in range(50):
        engine.submit(request(f"r{i}", [i] * 8, max_tokens=50))
    for _ in range(250):  # five requests, about 0.5 s each
        engine.step()
    for i in range(5):
        engine.submit(request(f"late{i}"))
    with pytest.raises(QueueFullError) as refused:
        engine.submit(request("more"))
    assert 20 < refused.value.retry_after_s < 30


def test_the_retry_time_is_about_how_long_the_queue_takes_whatever_was_before(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, _ = worlds(limits(max_waiting=60, max_batch=4), clock=clock)
    for i in range(20):  # one by one, with long pauses
        engine.submit(request(f"calm{i}", [i] * 8, max_tokens=50))
        drain(engine)
        clock.sleep(100)
    for i in range(60):
        engine.submit(request(f"flood{i}", [i % 50] * 8, max_tokens=50))
    while engine.load().waiting > 40:
        engine.step()
    for i in range(20):
        engine.submit(request(f"late{i}", [i] * 8, max_tokens=50))
    with pytest.raises(QueueFullError) as refused:
        engine.submit(request("more"))
    told_s, since_s = refused.value.retry_after_s, clock.now()
    while engine.load().waiting:
        engine.step()
    assert 0.7 < told_s / (clock.now() - since_s) < 1.5


def test_a_pool_smaller_than_the_context_cuts_the_context(worlds: Worlds, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine, log = worlds(limits(context_length=64), pages=8)
    assert engine.limits.context_length == 8 * PAGE
    assert "cut" in caplog.text
    engine.submit(request("r", [1] * 30, max_tokens=50))
    drain(engine)
    assert (len(log.tokens("r")), log.finish("r")) == (2, FinishReason.LENGTH)


def test_a_closed_engine_ends_its_requests_and_refuses_new_ones(worlds: Worlds) -> None:
    engine, log = worlds()
    engine.submit(request("running"))
    engine.step()
    engine.submit(request("waiting"))
    engine.close()
    engine.close()
    assert [log.finish(name) for name in ("running", "waiting")] == [FinishReason.ERROR] * 2
    with pytest.raises(InstanceUnavailableError, match="closed"):
        engine.submit(request("late"))


def test_an_illegal_move_is_an_error_that_tells_the_history() -> None:
    bounds = limits()
    moved = Request(
        request("r"),
        context_length=bounds.context_length,
        eos_token_ids=bounds.eos_token_ids,
        page_size=PAGE,
        prefix_cache=True,
        now=0.0,
    )
    moved.move(Phase.PREFILL, 1.0)
    moved.move(Phase.DONE, 2.5)
    with pytest.raises(
        IllegalMoveError, match=r"r cannot go from done to decode.*queued@0.000s > prefill@1.000s > done@2.500s"
    ):
        moved.move(Phase.DECODE, 3.0)


def test_a_log_sees_a_request_that_ends_twice() -> None:
    log = Log()
    log("s", [TokenEvent("r", finish=FinishReason.ABORT, cached_tokens=0), TokenEvent("r", finish=FinishReason.ABORT)])
    with pytest.raises(AssertionError):
        log.assert_each_ended_at_most_once()
