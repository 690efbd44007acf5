from __future__ import annotations

from pdmux_ray.policy.decisions import FetchChoice, FetchReason
from pdmux_ray.policy.fetching import plan_fetches

from .test_batching import PAGE, HitSeen, Seen, View, decoding, prefilling

ROOM, CACHED, TOO_LATE = FetchReason.ROOM, FetchReason.CACHED, FetchReason.TOO_LATE


def fetched(view: View, *names: str, max_batch: int = 8, now: float = 0.0, due: float = 1.0) -> list[tuple[str, FetchReason]]:
    return [(c.request_id, c.reason) for c in plan_fetches(view, dict.fromkeys(names, due), max_batch, now)]


def test_a_choice_names_its_request_and_its_reason() -> None:
    assert plan_fetches(View(waiting=[Seen("a", 20)]), {"a": 1.0}, 8, 0.0) == [FetchChoice("a", ROOM)]


def test_only_requests_with_a_peer_are_fetched() -> None:
    assert fetched(View(waiting=[Seen("a", 20), Seen("b", 20)]), "b") == [("b", ROOM)]


def test_whoever_waits_longer_has_a_first_claim_on_the_pages_wherever_it_is_prefilled() -> None:
    view = View(free_pages=5, waiting=[Seen("here", 4 * PAGE), Seen("far", PAGE), Seen("too many", 2 * PAGE), Seen("next", 1)])
    assert fetched(view, "far", "too many", "next") == [("far", ROOM)]
    assert fetched(View(free_pages=3, waiting=view.waiting), "far") == []


def test_pages_into_which_decodes_grow_are_not_given_away() -> None:
    view = View(free_pages=2, decoding=[decoding("d", PAGE + 1)], waiting=[Seen("a", 2 * PAGE)])
    assert fetched(view, "a") == []


def test_everyone_who_holds_pages_takes_a_place() -> None:
    view = View(decoding=[decoding("d", 5)], prefilling=[prefilling("p", 9, 4)], transferring=[prefilling("t", 9, 0)])
    view = View(decoding=view.decoding, prefilling=view.prefilling, transferring=view.transferring, waiting=[Seen("a", 3)])
    assert (fetched(view, "a", max_batch=3), fetched(view, "a", max_batch=4)) == ([], [("a", ROOM)])


def test_what_the_cache_has_but_for_the_last_token_is_not_fetched() -> None:
    hits = {"all": HitSeen(PAGE, 1), "some": HitSeen(PAGE, 0)}
    view = View(waiting=[Seen("all", PAGE + 1), Seen("some", PAGE + 2), Seen("one", 1)], hits=hits)
    assert fetched(view, "all", "some", "one") == [("all", CACHED), ("some", ROOM), ("one", CACHED)]


def test_who_is_late_is_prefilled_here_also_when_there_is_no_room() -> None:
    view = View(free_pages=1, waiting=[Seen("long", 5 * PAGE), Seen("a", 3)])
    assert fetched(view, "a", now=1.0) == [("a", TOO_LATE)]
    assert fetched(view, "long", now=0.9) == []
