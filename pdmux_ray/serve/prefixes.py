"""Which instance is thought to have which prefix in its cache: where a gateway has sent prompts that begin with it, lately.

A guess, whose errors cost time alone: the engine finds what is really there. Nobody tells what an instance evicts, so the
newest pages are remembered, as many as it has, and none for longer than `lifetime_s`. What was forgotten or evicted is there
again with the next prompt that is sent. Several gateways each know what went through them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from pdmux_ray.engine.pages import prompt_digests


class PrefixIndex:
    """Owner: the gateway's event loop. Seconds are on any one clock."""

    def __init__(self, page_size: int, lifetime_s: float) -> None:
        self._page_size = page_size
        self._lifetime_s = lifetime_s
        # Instance -> page -> when a prompt with it was last sent there, in this order.
        self._sent_s: dict[str, OrderedDict[bytes, float]] = {}

    def pages(self, prompt: Sequence[int]) -> list[bytes]:
        """A digest of each full page before the last token, over all tokens up to its end."""
        return prompt_digests(prompt, self._page_size)[: (len(prompt) - 1) // self._page_size]

    def cached(self, pages: Sequence[bytes], now: float) -> dict[str, int]:
        """Instance id -> leading tokens that it is thought to have; without those that have none."""
        oldest_s = now - self._lifetime_s
        found = {name: _leading(sent_s, pages, oldest_s) for name, sent_s in self._sent_s.items()}
        return {name: count * self._page_size for name, count in found.items() if count}

    def sent(self, instance_id: str, pages: Sequence[bytes], most_pages: int, now: float) -> None:
        """A prompt goes there, to be computed or to be fetched. `most_pages`: of the instance, in all."""
        sent_s = self._sent_s.setdefault(instance_id, OrderedDict())
        for page in reversed(pages):  # what follows is worth nothing without what is before, so it is forgotten first
            sent_s[page] = now
            sent_s.move_to_end(page)
        while sent_s and (len(sent_s) > most_pages or next(iter(sent_s.values())) < now - self._lifetime_s):
            sent_s.popitem(last=False)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forgets instances that are gone."""
        for name in [name for name in self._sent_s if name not in instance_ids]:
            del self._sent_s[name]


def _leading(sent_s: OrderedDict[bytes, float], pages: Sequence[bytes], oldest_s: float) -> int:
    count = 0
    for page in pages:
        if sent_s.get(page, -math.inf) < oldest_s:
            break
        count += 1
    return count
