"""Tokens and pages of steps that are taken at once, against those of steps one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.engine.alike import grow
from pdmux_ray.engine.pages import PagePool
from pdmux_ray.engine.request import Request
from pdmux_ray.types import NewRequest, SamplingParams

PAGE, TOKEN = 4, 7


def decoding(pool: PagePool, lengths: list[int]) -> list[Request]:
    """Requests of equal tokens but for their lengths, so that they fill equal pages; all but their last token is computed."""
    requests = []
    for index, length in enumerate(lengths):
        new = NewRequest(str(index), (TOKEN,) * length, SamplingParams(max_tokens=1000))
        request = Request(new, context_length=4096, eos_token_ids=frozenset(), page_size=PAGE, prefix_cache=True, now=0.0)
        request.start(request.prefix_hit(pool), pool)
        request.pages += pool.take(-(-length // PAGE) - len(request.pages))
        request.computed_tokens = length - 1
        request.publish(pool)
        requests.append(request)
    return requests


def one_by_one(requests: list[Request], pool: PagePool, steps: int) -> None:
    for _ in range(steps):
        for request in requests:
            if len(request.tokens) > len(request.pages) * PAGE:
                request.pages += pool.take(1)
        for request in requests:
            request.computed_tokens = len(request.tokens)
            if request.computed_tokens >= request.next_publish_tokens:
                request.publish(pool)
            request.tokens.append(TOKEN)


def seen(requests: list[Request], pool: PagePool) -> tuple[Any, ...]:
    held = [(r.tokens, r.pages, r.computed_tokens, r.next_publish_tokens, r.prefix_key) for r in requests]
    return held, [pool.state(page) for page in range(pool.pages)], pool.evictions, pool.by_owner()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 30))
def test_they_are_the_same_whatever_has_to_be_forgotten_for_them(lengths: list[int], cached: int, steps: int) -> None:
    worlds = []
    for taken in (grow, one_by_one):
        pool = PagePool(cached + 60, PAGE)
        (gone,) = decoding(pool, [cached * PAGE + 1])  # its pages are cached, and are those of the others' prefixes
        gone.give_up_pages(pool)
        requests = decoding(pool, lengths)
        spare = pool.take(pool.available - min(pool.available, -(-steps // PAGE) * len(lengths) + len(lengths)))
        if taken is grow:
            grow(requests, pool, steps, TOKEN)
        else:
            one_by_one(requests, pool, steps)
        pool.check_integrity([*(request.pages for request in requests), spare])
        worlds.append(seen(requests, pool))
    assert worlds[0] == worlds[1]
