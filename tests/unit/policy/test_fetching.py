from __future__ import annotations

from pdmux_ray.policy.decisions import FetchChoice, FetchReason
from pdmux_ray.policy.fetching import plan_fetches

from .test_batching import PAGE, HitSeen, Seen, View, decoding, prefilling

ROOM, SHARED, CACHED, TOO_LATE = FetchReason.ROOM, FetchReason.SHARED, FetchReason.CACHED, FetchReason.TOO_LATE


def fetched(view: View, *names: str, max_batch: int = 8, now: float = 0.0, due: float = 1.0) -> list[tuple[str, FetchReason]]:
    return [(c.request_id, c.reason) for c in plan_fetches(view, dict.fromkeys(names, due), max_batch, now)]


def test_a_choice_names_its_request_and_its_reason() -> None:
    assert plan_fetches(View(waiting=[Seen("a", 20)]), {"a": 1.0}, 8, 0.0) == [FetchChoice("a", ROOM)]


def test_only_requests_with_a_peer_are_fetched() -> None:
    assert fetched(View(waiting=[Seen("a", 20), Seen("b", 20)]), "b") == [("b", ROOM)]


def test_whoever_waits_longer_has_a_first_claim_on_the_pages_wherever_it_is_prefilled() -> None:
    waiting = [Seen("here", 3 * PAGE), Seen("far", PAGE + 1), Seen("too many", 2 * PAGE), Seen("next", 1)]
    view = View(free_pages=5, waiting=waiting)
    assert fetched(view, "far", "too many", "next") == [("far", ROOM)]
    assert fetched(View(free_pages=3, waiting=view.waiting), "far") == []


def test_pages_into_which_decodes_grow_are_not_given_away() -> None:
    view = View(free_pages=2, decoding=[decoding("d", PAGE + 1)], waiting=[Seen("a", 2 * PAGE)])
    assert fetched(view, "a") == []


def test_everyone_who_holds_pages_takes_a_place() -> None:
    view = View(decoding=[decoding("d", 5)], prefilling=[prefilling("p", 9, 4)], transferring=[prefilling("t", 9, 0)])
    view = View(decoding=view.decoding, prefilling=view.prefilling, transferring=view.transferring, waiting=[Seen("a", 20)])
    assert (fetched(view, "a", max_batch=3), fetched(view, "a", max_batch=4)) == ([], [("a", ROOM)])


def test_less_than_a_page_is_not_fetched() -> None:
    hits = {"all": HitSeen(PAGE, 1), "most": HitSeen(PAGE, 0), "some": HitSeen(PAGE, 0)}
    view = View(waiting=[Seen("all", PAGE + 1), Seen("most", 2 * PAGE), Seen("some", 2 * PAGE + 1), Seen("one", 1)], hits=hits)
    assert fetched(view, *hits, "one") == [("all", CACHED), ("most", CACHED), ("some", ROOM), ("one", CACHED)]


def test_equal_prompts_are_fetched_once_and_the_others_wait() -> None:
    waiting = [Seen(name, 40, prefix_key=name[:1].encode()) for name in ("a1", "b1", "a2", "b2", "c1")]
    view = View(waiting=waiting, transferring=[Seen("c0", 40, prefix_key=b"c")])
    names = [request.request_id for request in waiting]
    assert fetched(view, *names) == [("a1", ROOM), ("b1", ROOM), ("a2", SHARED), ("b2", SHARED), ("c1", SHARED)]


def test_without_a_prefix_cache_to_find_it_in_every_prompt_is_fetched() -> None:
    view = View(waiting=[Seen("a", 40), Seen("b", 40)], transferring=[Seen("c", 40)])
    assert fetched(view, "a", "b") == [("a", ROOM), ("b", ROOM)]


def test_who_is_late_is_prefilled_here_also_when_there_is_no_room() -> None:
    view = View(free_pages=1, waiting=[Seen("long", 5 * PAGE), Seen("a", 3)])
    assert fetched(view, "a", now=1.0) == [("a", TOO_LATE)]
    assert fetched(view, "long", now=0.9) == []
