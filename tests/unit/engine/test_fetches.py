"""The decode side of a handoff: a prompt whose KV comes from elsewhere gets its own tokens, or is prefilled here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.api import LossReason
from pdmux_ray.clock import VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.errors import RequestError
from pdmux_ray.policy.decisions import FetchReason
from pdmux_ray.types import FinishReason, Mode, NewRequest

from .handoff_world import Link, Pair, remote
from .test_schedules import drain
from .world import PAGE, VOCAB, Log, Worlds, expected, limits, request

SPLIT = limits(mode=Mode.SPLIT, multiplex=MultiplexConfig(policy="fixed", block_layers=3))
BOUNDS = pytest.mark.parametrize(
    "bounds", [limits(), limits(mode=Mode.CHUNKED), SPLIT], ids=["prefill_first", "chunked", "split"]
)


def assert_nothing_is_lent(engine: Engine) -> None:
    load = engine.load()
    assert (load.leased_pages, load.quarantined_pages, load.running, load.free_pages) == (0, 0, 0, load.total_pages)
    engine.check_integrity()


@BOUNDS
def test_a_prompt_that_a_peer_prefills_gets_its_tokens_without_a_prefill_here(pair: Pair, bounds: EngineLimits) -> None:
    link, log = pair(bounds)
    link.decode.submit(new := remote("r", range(22), max_tokens=6))
    assert not link.decode.step()
    link.carry()
    drain(link.decode)
    assert (log.tokens("r"), log.finish("r")) == expected(new, link.decode.limits)
    counters = link.decode.counters
    assert (counters.prefill_tokens, counters.fetches["landed"], counters.fetch_choices[FetchReason.ROOM]) == (0, 1, 1)
    assert counters.kv_received_tokens == counters.kv_used_tokens == 21
    drain(link.prefill)
    assert_nothing_is_lent(link.decode)
    assert_nothing_is_lent(link.prefill)


def test_only_what_the_prefix_cache_lacks_is_fetched_into_the_pages_that_need_it(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(request("before", range(2 * PAGE), max_tokens=1))
    drain(link.decode)
    link.decode.submit(new := remote("r", range(4 * PAGE + 1)))
    link.decode.step()
    fetch = link.newest.fetch
    assert (fetch.start, len(fetch.pages), fetch.tokens) == (2 * PAGE, 2, tuple(range(4 * PAGE)))
    assert link.decode.load().free_pages == 64 - 5  # the last token's page is not the peer's to write
    link.carry()
    drain(link.decode)
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert log.events["r"][0].cached_tokens == 2 * PAGE


def test_what_has_landed_is_in_the_prefix_cache_and_is_not_fetched_again(pair: Pair) -> None:
    link, log = pair()
    for name in ("first", "second"):
        link.decode.submit(remote(name, range(2 * PAGE + 1)))
        link.decode.step()
        link.carry()
        drain(link.decode)
    assert len(link.pushes) == 1
    assert log.events["second"][0].cached_tokens == 2 * PAGE
    assert link.decode.counters.fetch_choices[FetchReason.CACHED] == 1


def choices(link: Link, count: int = 3, peers: tuple[str, ...] = ("p",)) -> list[NewRequest]:
    """Submits so many requests with one prompt, whose tokens are drawn differently; a step has been taken."""
    news = [remote(f"r{seed}", range(22), seed=seed, peers=peers) for seed in range(count)]
    for new in news:
        link.decode.submit(new)
    link.decode.step()
    return news


def assert_right(link: Link, log: Log, news: Sequence[NewRequest]) -> None:
    for new in news:
        assert log.tokens(new.request_id) == expected(new, link.decode.limits)[0]


@BOUNDS
def test_choices_of_one_prompt_are_fetched_once(pair: Pair, bounds: EngineLimits) -> None:
    link, log = pair(bounds)
    news = choices(link)
    assert (len(link.pushes), link.decode.load().running) == (1, 3)
    assert link.decode.load().free_pages == 64 - 6, "who waits for another one's fetch holds nothing"
    link.carry()
    drain(link.decode)
    assert_right(link, log, news)
    counters = link.decode.counters
    assert (counters.prefill_tokens, counters.kv_received_tokens, counters.kv_used_tokens) == (2 * 2, 21, 21)
    assert [log.events[new.request_id][0].cached_tokens for new in news] == [0, 20, 20]
    assert [counters.fetch_choices[why] for why in (FetchReason.ROOM, FetchReason.SHARED, FetchReason.CACHED)] == [1, 2, 2]
    drain(link.prefill)
    assert_nothing_is_lent(link.decode)


def test_when_a_fetch_for_several_is_lost_the_next_of_them_asks_anew(pair: Pair) -> None:
    link, log = pair()
    news = choices(link, peers=("dead", "alive"))
    link.lose(*link.pushes, LossReason.PEER_DEAD, safe=True)
    link.decode.step()
    assert [push.fetch.peer for push in link.pushes.values()] == ["dead", "alive"]
    link.carry()
    drain(link.decode)
    assert_right(link, log, news)
    assert link.decode.counters.kv_received_tokens == 21


def test_when_whoever_fetches_for_several_is_aborted_the_next_of_them_fetches(pair: Pair) -> None:
    link, log = pair()
    news = choices(link)
    link.decode.abort(["r0"])
    link.decode.step()
    link.decode.step()
    assert [push.dropped for push in link.pushes.values()] == [True, False]
    assert (link.decode.load().quarantined_pages, link.decode.load().running) == (6, 2)
    link.lose(link.alive[0], LossReason.DROPPED, safe=True)
    link.carry()
    drain(link.decode)
    assert_right(link, log, news[1:])


def test_who_waits_for_another_ones_fetch_may_be_aborted_or_overdue(pair: Pair) -> None:
    link, log = pair(clock=(clock := VirtualClock()))
    news = choices(link)
    late = remote("late", range(22), due_s=2.0)
    link.decode.submit(late)
    link.decode.step()
    link.decode.abort(["r1"])
    link.decode.step()
    assert (log.finish("r1"), link.decode.load().running) == (FinishReason.ABORT, 3)
    clock.sleep(2.0)
    drain(link.decode)
    assert_right(link, log, [late])
    assert (len(link.pushes), link.decode.counters.prefill_tokens) == (1, 22), "it is prefilled here"
    link.carry()
    drain(link.decode)
    assert_right(link, log, [news[0], news[2]])


def test_without_a_prefix_cache_every_choice_is_fetched(pair: Pair) -> None:
    link, log = pair(limits(prefix_cache=False))
    news = choices(link)
    assert len(link.pushes) == 3
    link.carry()
    drain(link.decode)
    assert_right(link, log, news)


def test_a_cached_prompt_that_is_preempted_is_not_fetched_later(pair: Pair) -> None:
    link, log = pair(pages=11)
    news = [request("old", [3] * 8, max_tokens=30), remote("new", range(2 * PAGE + 1), max_tokens=30)]
    link.decode.submit(request("before", range(2 * PAGE), max_tokens=1))
    drain(link.decode)
    for new in news:
        link.decode.submit(new)
    drain(link.decode)
    assert (link.decode.counters.preemptions > 0, link.pushes) == (True, {})
    for new in news:
        assert log.tokens(new.request_id) == expected(new, link.decode.limits)[0]


def test_who_is_given_pages_first_does_not_evict_what_another_one_hits(pair: Pair) -> None:
    link, _ = pair(pages=12)
    for name, prompt in (("b", [1] * 8), ("x", [2] * 20)):
        link.decode.submit(request(name, prompt, max_tokens=1))
        drain(link.decode)
    link.decode.submit(remote("no hit", [3] * 22))
    link.decode.submit(remote("hit", [1] * 8 + [4] * 5))
    link.decode.step()
    assert [push.fetch.start for push in link.pushes.values()] == [0, 8]


def test_a_prompt_of_one_token_leaves_nothing_to_fetch(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(new := remote("r", [5]))
    drain(link.decode)
    assert not link.pushes
    assert log.tokens("r") == expected(new, link.decode.limits)[0]


@BOUNDS
def test_what_is_lost_is_prefilled_here_in_fresh_pages_and_late_writes_hurt_nobody(pair: Pair, bounds: EngineLimits) -> None:
    link, log = pair(bounds, pages=16)
    link.decode.submit(new := remote("r", range(22), max_tokens=6))
    link.decode.step()
    (handoff,) = link.pushes
    link.lose(handoff)
    while link.decode.step():
        link.scribble(handoff)
        link.decode.check_integrity()
    assert (log.tokens("r"), log.finish("r")) == expected(new, link.decode.limits)
    assert link.decode.counters.fetches[LossReason.PEER_SILENT.value] == 1
    assert (link.decode.load().quarantined_pages, link.decode.load().free_pages) == (6, 10)
    link.make_safe(handoff)
    link.decode.step()
    assert_nothing_is_lent(link.decode)


def test_pages_of_a_loss_that_is_safe_are_free_at_once(pair: Pair) -> None:
    link, log = pair(pages=6)
    link.decode.submit(new := remote("r", range(22), max_tokens=2))
    link.decode.step()
    link.lose(*link.pushes, safe=True)
    drain(link.decode)
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert_nothing_is_lent(link.decode)


def test_after_a_loss_the_next_peer_is_asked(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(new := remote("r", range(22), peers=("dead", "alive")))
    link.decode.step()
    link.lose(*link.pushes, LossReason.PEER_DEAD, safe=True)
    link.decode.step()
    assert [push.fetch.peer for push in link.pushes.values()] == ["dead", "alive"]
    link.carry()
    drain(link.decode)
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert link.decode.counters.prefill_tokens == 0


def test_a_request_for_which_there_are_no_pages_waits_for_them_and_is_then_fetched(pair: Pair) -> None:
    link, log = pair(pages=8)
    link.decode.submit(request("here", [3] * 20, max_tokens=4))
    link.decode.step()
    link.decode.submit(new := remote("r", range(22)))
    link.decode.step()
    assert not link.pushes
    drain(link.decode)
    link.carry()
    drain(link.decode)
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert link.decode.counters.fetch_choices[FetchReason.ROOM] == 1


def test_what_waits_for_a_fetch_is_no_prefill_to_come_until_there_is_no_peer_left(pair: Pair) -> None:
    link, _ = pair()
    link.decode.submit(remote("r", range(22)))
    assert link.decode.load().queued_prefill_tokens == 0
    link.decode.step()
    assert link.decode.load().queued_prefill_tokens == 0
    link.lose(*link.pushes)
    link.decode.submit(request("behind", [3] * 20))
    assert link.decode.load().queued_prefill_tokens == 20
    link.decode.step()
    assert (link.decode.load().decoding, link.decode.counters.prefill_tokens) == (1, 22)
    assert link.decode.load().queued_prefill_tokens == 20


def test_who_waits_for_pages_until_the_fetch_is_due_is_prefilled_here(pair: Pair) -> None:
    link, log = pair(pages=16)
    link.decode.submit(request("here", [3] * 36, max_tokens=25))
    link.decode.step()
    link.decode.submit(new := remote("r", range(30), due_s=0.2))
    drain(link.decode)
    assert not link.pushes
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert link.decode.counters.fetch_choices[FetchReason.TOO_LATE] == 1


def test_a_request_from_elsewhere_does_not_pass_one_that_waits_for_pages_longer(pair: Pair) -> None:
    link, _ = pair(pages=12)
    link.decode.submit(request("running", [3] * 20, max_tokens=12))
    link.decode.step()
    link.decode.submit(request("long", [4] * 40))
    link.decode.submit(remote("short", [5] * 6))
    link.decode.step()
    assert not link.pushes
    drain(link.decode)


def test_transfers_take_places_in_the_batch(pair: Pair) -> None:
    link, log = pair(limits(max_batch=2))
    for name in ("a", "b", "c"):
        link.decode.submit(remote(name, [ord(name) % VOCAB] * 9))
    link.decode.submit(request("d"))
    assert not link.decode.step()
    assert len(link.pushes) == 2
    assert (link.decode.load().running, link.decode.load().waiting) == (2, 2)
    while link.decode.step() or link.alive:
        link.carry()
        assert link.decode.load().running <= 2
    assert all(log.finish(name) is FinishReason.LENGTH for name in "abcd")


@pytest.mark.parametrize("answer", ["lands", "is lost", "is lost but safe"])
def test_who_is_aborted_in_transfer_is_told_at_once_and_its_pages_stay_until_the_peer_writes_no_more(
    pair: Pair, answer: str
) -> None:
    link, log = pair()
    link.decode.submit(remote("r", range(22)))
    link.decode.step()
    link.decode.abort(["r"])
    link.decode.step()
    assert (log.finish("r"), link.newest.dropped) == (FinishReason.ABORT, True)
    assert link.decode.load().quarantined_pages == 6
    link.want(*link.pushes)
    drain(link.prefill)
    if answer == "lands":
        link.land(*link.pushes)
    else:
        link.lose(*link.pushes, LossReason.DROPPED, safe=answer == "is lost but safe")
    link.decode.step()
    assert (link.decode.load().quarantined_pages == 6) is (answer == "is lost")
    assert link.decode.counters.kv_used_tokens == 0


def test_a_deadline_that_passes_in_transfer_ends_the_request(pair: Pair) -> None:
    link, log = pair(clock=(clock := VirtualClock()))
    link.decode.submit(replace(remote("r", range(22)), deadline_s=1.0))
    link.decode.step()
    assert link.newest.fetch.deadline == 1.0
    clock.sleep(1.0)
    link.decode.step()
    assert log.error("r")[0] == "DeadlineError"
    assert link.newest.dropped


def test_a_fetch_that_is_overdue_is_given_up_also_when_the_port_says_nothing(pair: Pair) -> None:
    link, log = pair(clock=(clock := VirtualClock()))
    link.decode.submit(new := remote("r", range(22), due_s=2.0, peers=("a", "b")))
    link.decode.step()
    clock.sleep(2.0)
    drain(link.decode)
    assert log.tokens("r") == expected(new, link.decode.limits)[0]
    assert (len(link.pushes), link.newest.dropped) == (1, True)


def test_a_landed_request_that_is_preempted_goes_on_here(pair: Pair) -> None:
    link, log = pair(pages=11)
    news = [request("old", [3] * 8, max_tokens=30), remote("new", range(22), max_tokens=12, peers=("a", "b"))]
    for new in news:
        link.decode.submit(new)
    while link.decode.step() or link.alive:
        link.carry()
    assert link.decode.counters.preemptions > 0
    assert len(link.pushes) == 1
    for new in news:
        assert log.tokens(new.request_id) == expected(new, link.decode.limits)[0]


def test_decodes_that_cannot_grow_for_transfers_wait_for_them(pair: Pair) -> None:
    link, log = pair(pages=8)
    news = [request("old", [3] * 7, max_tokens=12), remote("new", range(24), max_tokens=2)]
    link.decode.submit(news[0])
    link.decode.step()
    link.decode.submit(news[1])
    while link.decode.step():
        pass
    assert len(log.tokens("old")) < 12
    link.carry()
    drain(link.decode)
    counters = link.decode.counters  # what landed was preempted before it was used
    assert (counters.preemptions, counters.kv_received_tokens, counters.kv_used_tokens) == (1, 23, 0)
    for new in news:
        assert log.tokens(new.request_id) == expected(new, link.decode.limits)[0]


def test_prefill_peers_need_a_port_and_a_deadline(worlds: Worlds, pair: Pair) -> None:
    alone, _ = worlds()
    with pytest.raises(RequestError, match="not linked"):
        alone.submit(remote("r", [1, 2]))
    link, _ = pair()
    with pytest.raises(RequestError, match="fetch_deadline_s"):
        link.decode.submit(replace(remote("r", [1, 2]), fetch_deadline_s=None))


def test_closing_ends_who_is_in_transfer_and_tells_the_port(pair: Pair) -> None:
    link, log = pair()
    link.decode.submit(remote("r", range(22)))
    link.decode.step()
    link.decode.close()
    assert (log.finish("r"), link.newest.dropped) == (FinishReason.ERROR, True)
    assert link.decode.load().quarantined_pages == 6
