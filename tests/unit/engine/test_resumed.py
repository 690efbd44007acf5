"""A request that another instance had before: this one makes what is left of its tokens, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.config import MultiplexConfig
from pdmux_ray.errors import ContextLengthError, QueueFullError, RequestError
from pdmux_ray.types import FinishReason, Mode, NewRequest

from .handoff_world import Link, remote
from .lane_world import device
from .test_schedules import drain
from .world import PAGE, VOCAB, Worlds, expected, limits, request

SPLIT = MultiplexConfig(policy="fixed", block_layers=3)


def resumed(new: NewRequest, made: int) -> NewRequest:
    """As it is after so many of its tokens."""
    return replace(new, generated=tuple(expected(new, limits())[0][:made]))


@st.composite
def interrupted(draw: st.DrawFn) -> list[NewRequest]:
    """Requests of which all, some or no tokens but the last have been made; some are new ones."""
    requests = []
    for index in range(draw(st.integers(1, 5))):
        max_tokens = draw(st.integers(1, 25))
        new = request(
            f"r{index}",
            [draw(st.sampled_from([1, 2]))] + [3] * draw(st.integers(0, 20)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            seed=draw(st.integers(0, 9)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),
            logprobs=draw(st.sampled_from([None, 2])),
        )
        made = draw(st.one_of(st.none(), st.integers(0, len(expected(new, limits())[0]) - 1)))
        requests.append(new if made is None else resumed(new, made))
    return requests


@given(
    requests=interrupted(),
    mode=st.sampled_from([Mode.PREFILL_FIRST, Mode.CHUNKED, Mode.SPLIT]),
    pages=st.integers(16, 40),  # the fewest make some give up their pages, and begin again
    prefix_cache=st.booleans(),
)
def test_after_any_of_its_tokens_it_makes_the_others(
    requests: list[NewRequest], mode: Mode, pages: int, prefix_cache: bool
) -> None:
    worlds = Worlds()
    engine, log = worlds(limits(mode=mode, prefix_cache=prefix_cache, multiplex=SPLIT), pages)
    for new in requests:
        engine.submit(new)
    drain(engine)
    for new in requests:
        tokens, finish = expected(new, engine.limits)
        made = len(new.generated or ())
        assert (log.tokens(new.request_id), log.finish(new.request_id)) == (tokens[made:], finish)
        with_logprobs = [event for event in log.events[new.request_id] if event.logprobs is not None]
        assert len(with_logprobs) == (len(tokens) - made if new.params.logprobs is not None else 0)
    worlds.close()


def test_what_the_prefix_cache_has_of_its_tokens_is_not_computed_again(worlds: Worlds) -> None:
    engine, log = worlds()
    new = request("r", range(2 * PAGE), max_tokens=3 * PAGE)
    for name in ("before", "after"):
        engine.submit(replace(resumed(new, 2 * PAGE + 1), request_id=name))
        drain(engine)
    assert log.tokens("after") == log.tokens("before") == expected(new, engine.limits)[0][2 * PAGE + 1 :]
    assert engine.counters.prefill_tokens == (4 * PAGE + 1) + 1


def test_what_it_knows_can_come_from_another_instance_its_own_tokens_too(worlds: Worlds) -> None:
    link = Link()
    link.decode, log = worlds(port=link.at_decode)
    link.prefill, _ = worlds(port=link.at_prefill)
    new = resumed(remote("r", range(10), max_tokens=20), 7)
    link.decode.submit(new)
    assert not link.decode.step()
    link.carry()
    drain(link.decode)
    assert (log.tokens("r"), log.finish("r")) == (expected(new, link.decode.limits)[0][7:], FinishReason.LENGTH)
    counters = link.decode.counters
    assert counters.kv_received_tokens == counters.kv_used_tokens == 10 + 7 - 1
    assert counters.prefill_tokens == 0
    link.settle()


@pytest.mark.parametrize("made", [0, 2])
def test_it_has_waited_once_and_is_taken_in_whoever_waits(worlds: Worlds, made: int) -> None:
    engine, log = worlds(limits(max_waiting=1))
    engine.submit(first := request("first"))
    with pytest.raises(QueueFullError):
        engine.submit(request("new"))
    engine.submit(new := resumed(request("r"), made))
    drain(engine)
    for each in (first, new):
        assert log.tokens(each.request_id) == expected(each, engine.limits)[0][len(each.generated or ()) :]


def test_it_is_not_refused_because_it_will_be_late(worlds: Worlds) -> None:
    hasty = MultiplexConfig(itl_s=1.0, ttft_s=1.0, admission="refuse")
    engine, log = worlds(limits(mode=Mode.SPLIT, multiplex=hasty), runner=device)
    for index in range(2):
        engine.submit(request(f"before{index}", [index] * 40))
    with pytest.raises(QueueFullError, match="first token would come"):
        engine.submit(request("new", range(40)))
    engine.submit(new := resumed(request("r", range(40)), 2))
    drain(engine)
    assert log.tokens("r") == expected(new, engine.limits)[0][2:]


def test_what_cannot_go_on_is_refused_with_the_reason(worlds: Worlds) -> None:
    engine, _ = worlds()
    with pytest.raises(RequestError, match="5 tokens of 5 are there already"):
        engine.submit(resumed(request("r", max_tokens=5), 5))
    with pytest.raises(ContextLengthError, match="64 tokens"):
        engine.submit(replace(request("r", [1] * 60, max_tokens=9), generated=(1,) * 4))
    with pytest.raises(RequestError, match="Token id 50 is outside") as refused:
        engine.submit(replace(request("r"), generated=(50,)))
    assert refused.value.param == "generated"


def test_once_it_has_a_token_it_is_in_no_hurry_any_more(worlds: Worlds) -> None:
    engine, _ = worlds(limits(multiplex=MultiplexConfig(ttft_s=1.0)))
    engine.submit(resumed(request("r", max_tokens=9), 3))
    engine.step()
    assert engine._scheduler.requests["r"].ttft_deadline_s == float("inf")
