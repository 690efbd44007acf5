"""Whose first token is due first: the order in which prompts are prefilled.

Earliest TTFT deadline first, with two exceptions. A request without a deadline has its first token out already (it was
preempted while somebody reads it) or nobody has one: it goes first, the oldest before the others. And one that will miss its
deadline whatever happens lets pass whoever is due less than `patience_s` after it, so that one miss does not become many; no
longer, so that it does not starve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

from pdmux_ray.policy.views import JobView, LanesView, Piece, PrefixHit, RequestView

LOOKED_AT = 16  # waiting requests whose time is predicted in one plan, at most: a plan's cost does not grow with the queue
MUCH_LONGER = 4.0  # times: then a job without a deadline is overtaken by another one without

Pace: TypeAlias = Callable[[Sequence[Piece], int], float]
"""(pieces, layers) -> predicted seconds at the pace of the step that is planned."""


class Entrant(NamedTuple):
    """A request that no job computes yet."""

    request: RequestView
    hit: PrefixHit | None  # None: it holds its pages already
    piece: Piece


def entrant(view: LanesView, request: RequestView) -> Entrant:
    """What is left to prefill of a request: after what it has computed if it holds pages, else after its prefix hit."""
    if request.held_pages:
        done = request.computed_tokens
        return Entrant(request, None, Piece(request.known_tokens - done, done))
    hit = view.prefix_hit(request)
    return Entrant(request, hit, Piece(request.known_tokens - hit.tokens, hit.tokens))


def most_urgent_first(
    view: LanesView, requests: Iterable[RequestView], patience_s: float, pace: Pace | None
) -> Iterator[Entrant]:
    """Lazily, because few of them start in a step. Without `pace` only those are late whose deadline has passed."""
    now = view.now
    heap: list[tuple[float, int, int, RequestView, Entrant | None]] = []
    for number, request in enumerate(requests):
        due = request.ttft_deadline_s
        heap.append((rank_of(due, due < now, patience_s), request.arrival, number, request, None))
    heapify(heap)
    looked_at = 0
    while heap:
        rank, arrival, number, request, seen = heappop(heap)
        if seen is not None:
            yield seen
            continue
        found = entrant(view, request)
        due = request.ttft_deadline_s
        if pace is not None and now <= due < math.inf and looked_at < LOOKED_AT:
            looked_at += 1
            if now + pace((found.piece,), view.layers) > due:
                heappush(heap, (rank + patience_s, arrival, number, request, found))
                continue
        yield found


def resting_order(
    view: LanesView, jobs: Sequence[JobView], patience_s: float, pace: Pace | None
) -> list[tuple[JobView, float]]:
    """Jobs between two blocks, most urgent first, each with how long the rest of it takes (0 without a prediction)."""
    ranked = []
    for job in jobs:
        rest_s = pace(job.pieces, view.layers - job.layers_done) if pace is not None else 0.0
        due = min([request.ttft_deadline_s for request in job.requests])
        ranked.append((rank_of(due, due < view.now + rest_s, patience_s), job.job_id, job, rest_s))
    return [(job, rest_s) for _, _, job, rest_s in sorted(ranked, key=lambda ranking: ranking[:2])]


def rank_of(due_s: float, late: bool, patience_s: float) -> float:
    """Smaller is more urgent."""
    if due_s == math.inf:
        return -math.inf
    return due_s + patience_s if late else due_s


def may_overtake(now: float, new_s: float, due_s: float, resting: Sequence[tuple[JobView, float]], most_overtakes: int) -> bool:
    """Whether a new job of `new_s` seconds, due at `due_s`, runs before all of `resting`, which stand in their order.

    Only when it would miss its deadline otherwise, when none of them misses its own for it that would not miss it anyway, and
    when none has been overtaken as often as is allowed: whoever has begun waits for a bounded number of jobs. One without a
    deadline that can be kept overtakes only much longer ones without such a deadline.
    """
    if now + sum(rest_s for _, rest_s in resting) + new_s <= due_s < math.inf:
        return False
    hurried = now + new_s <= due_s < math.inf
    ends_s = now
    for job, rest_s in resting:
        ends_s += rest_s
        if job.overtaken >= most_overtakes:
            return False
        kept = [request for request in job.requests if ends_s <= request.ttft_deadline_s < math.inf]
        if any(request.ttft_deadline_s < ends_s + new_s for request in kept):
            return False
        if not hurried and (kept or rest_s < MUCH_LONGER * new_s):
            return False
    return True
