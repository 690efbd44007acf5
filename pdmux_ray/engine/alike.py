"""Decode steps that are alike, taken in at once: what they do to tokens and pages is what they would do one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.engine.pages import PagePool
from pdmux_ray.engine.request import Request


def grow(decodes: Sequence[Request], pool: PagePool, steps: int, token: int) -> None:
    """Every request gets so many tokens, one a step. A step takes a page for each that has none for its newest token, and then
    publishes those that have become full, both in the order of `decodes`. There are pages enough."""
    size, due = pool.page_size, list[tuple[int, bool, int]]()  # step, whether a page is full, whose
    for place, request in enumerate(decodes):
        known = len(request.tokens)
        due += [(step, False, place) for step in range(max(len(request.pages) * size + 1 - known, 0), steps, size)]
        due += [(step, True, place) for step in range(request.next_publish_tokens - known, steps, size)]
        request.tokens += [token] * steps
    for step, full, place in sorted(due):
        request = decodes[place]
        if full:
            request.computed_tokens = len(request.tokens) - steps + step
            request.publish(pool)
        else:
            request.pages += pool.take(1)
    for request in decodes:
        request.computed_tokens = len(request.tokens) - 1
