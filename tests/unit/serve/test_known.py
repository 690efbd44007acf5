from __future__ import annotations

import math

from pdmux_ray.policy.views import Queued
from pdmux_ray.serve.known import SHOWN_S, SHOWN_THERE_S, Promises, Standing, peers_of, view_of
from pdmux_ray.types import Load, Role

STANDING = Standing("i", Role.DECODE, frozenset({"p"}))
LOAD = Load(
    running=3,
    waiting=2,
    free_pages=10,
    total_pages=20,
    steps=7,
    step_age_s=0.01,
    decoding=1,
    decode_context_tokens=50,
    queued_prefill_tokens=400,
)


def promised(*made: tuple[int, float], there: bool = False) -> Promises:
    """(tokens, seconds until due), all made at once, at 0 s."""
    promises = Promises()
    for tokens, left_s in made:
        promises.make(tokens, 0.0, left_s, there)
    return promises


def test_whoever_decodes_has_kv_from_those_that_prefill_and_who_is_not_known_yet_from_nobody() -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "m": Role.MUX, "new": None}
    both = frozenset({"p", "q"})
    assert peers_of(roles) == {"p": frozenset(), "q": frozenset(), "d": both, "m": both}


def test_a_promise_counts_until_figures_must_show_it() -> None:
    promises = promised((100, 1.0))
    promises.make(20, 0.01, 1.0, there=False)
    assert promises.open(SHOWN_S) == 120
    assert promises.open(0.005 + SHOWN_S) == 20
    assert promises.open(0.02 + SHOWN_S) == 0


def test_one_that_comes_by_way_of_another_instance_counts_for_longer() -> None:
    assert promised((100, 1.0), there=True).open(SHOWN_THERE_S) == 100


def test_of_what_figures_say_is_left_those_due_first_are_done_first() -> None:
    promises = promised((100, 1.0), (10, 0.2), (30, 0.5))
    promises.heard(tokens=110, now=0.1)
    assert promises.queue(0.1) == (Queued(0.4, 10), Queued(0.9, 100))
    promises.heard(tokens=60, now=0.2)
    assert promises.queue(0.2) == (Queued(0.8, 60),)
    promises.heard(tokens=0, now=0.3)
    assert promises.queue(0.3) == ()


def test_what_figures_need_not_show_yet_is_not_done() -> None:
    promises = promised((10, math.inf))
    promises.heard(tokens=0, now=SHOWN_S)
    assert promises.queue(0.0) == (Queued(math.inf, 10),)


def test_a_view_is_what_the_figures_say_and_what_they_cannot_know() -> None:
    view = view_of(STANDING, LOAD, 1.0, 1.02, 1, promised((120, 2.0)))
    assert (view.instance_id, view.role, view.peers, view.line_is_up) == ("i", Role.DECODE, frozenset({"p"}), True)
    assert (view.running, view.waiting, view.decode_batch, view.queued_prefill_tokens) == (3, 2, 1, 400)
    assert (round(view.silence_s, 9), view.on_their_way, view.on_their_way_tokens) == (0.02, 1, 0)
    assert [queued.tokens for queued in view.queue] == [120]


def test_without_figures_the_line_is_not_up() -> None:
    view = view_of(STANDING, None, 0.0, 0.0, 0, Promises())
    assert (view.line_is_up, view.running, view.free_pages, view.queue) == (False, 0, 0, ())
