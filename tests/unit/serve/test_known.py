from __future__ import annotations

from pdmux_ray.serve.known import SHOWN_S, Promises, Standing, view_of
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


def test_a_promise_counts_until_figures_must_show_it() -> None:
    promises = Promises()
    promises.make(100, 1.0)
    promises.make(20, 1.1)
    assert promises.open(1.0 + SHOWN_S) == 120
    assert promises.open(1.05 + SHOWN_S) == 20
    assert promises.open(1.2 + SHOWN_S) == 0


def test_a_view_is_what_the_figures_say_and_what_they_cannot_know() -> None:
    view = view_of(STANDING, LOAD, silence_s=0.5, on_their_way=1, on_their_way_tokens=120)
    assert (view.instance_id, view.role, view.peers, view.line_is_up) == ("i", Role.DECODE, frozenset({"p"}), True)
    assert (view.running, view.waiting, view.decode_batch, view.queued_prefill_tokens) == (3, 2, 1, 400)
    assert (view.silence_s, view.on_their_way, view.on_their_way_tokens) == (0.5, 1, 120)


def test_without_figures_the_line_is_not_up() -> None:
    view = view_of(STANDING, None, silence_s=0.0, on_their_way=0, on_their_way_tokens=0)
    assert (view.line_is_up, view.running, view.free_pages) == (False, 0, 0)
