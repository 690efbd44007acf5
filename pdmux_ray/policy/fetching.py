"""Who of the waiting requests that have a prefill peer is given pages, so that the peer can write into them.

In order of arrival: a request reserves its pages only when there is room for all that have waited longer, whether they are
prefilled here or elsewhere. So no long prompt starves because the short ones behind it come from somewhere else.
Equal prompts, such as the n choices of one request, are fetched once: the others wait, and find them in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from pdmux_ray.policy.batching import Room, pages_to_grow
from pdmux_ray.policy.decisions import FetchChoice, FetchReason
from pdmux_ray.policy.views import EngineView


def plan_fetches(view: EngineView, due_s: Mapping[str, float], max_batch: int, now: float) -> list[FetchChoice]:
    """`due_s`: of each waiting request that has a peer, by when its KV must have landed. The others go on waiting."""
    late = [name for name, due in due_s.items() if now >= due]
    choices = [FetchChoice(name, FetchReason.TOO_LATE) for name in late]
    places = max_batch - len(view.decoding) - len(view.prefilling) - len(view.transferring)
    fetching = {request.prefix_key for request in view.transferring}
    room = Room(view.page_size, view.free_pages - pages_to_grow(view.decoding, view.page_size), places)
    for request in islice(view.waiting, max(places, 0)):
        hit = view.prefix_hit(request)
        if room.take(request, hit) is not None:
            break
        name = request.request_id
        if name in due_s and now < due_s[name]:
            key = request.prefix_key
            if request.known_tokens - 1 - hit.tokens < view.page_size:
                reason = FetchReason.CACHED
            else:
                reason = FetchReason.SHARED if key is not None and key in fetching else FetchReason.ROOM
                fetching.add(key)
            choices.append(FetchChoice(name, reason))
    return choices
