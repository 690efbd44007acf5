"""A request inside the engine: its lengths, its pages, its phase and its history.

|<------------ known_tokens ------------->|
|<--- prompt_tokens --->|<-- generated -->|          limit_tokens: where it ends at the latest
|<------ computed_tokens ------>|                    their KV is in `pages`; always < known_tokens
"""

from __future__ import annotations

import math
from itertools import pairwise

from kv_transfer.api import HandoffId
from pdmux_ray.engine.pages import ROOT_DIGEST, Hit, PagePool, page_digest, prompt_digests
from pdmux_ray.errors import IllegalMoveError, IntegrityError
from pdmux_ray.types import LEGAL_MOVES, FinishReason, NewRequest, Phase


class Request:
    """Owned by the step loop once submitted; implements `policy.views.RequestView` and `engine.runner.SequenceView`."""

    __slots__ = (
        "_digests",
        "_page_size",
        "_published_pages",
        "arrival",
        "cached_tokens",
        "computed_tokens",
        "deadline_s",
        "exported",
        "fetch_deadline_s",
        "given_tokens",
        "handoff",
        "history",
        "host_sampled",
        "likely_hit_tokens",
        "limit_tokens",
        "next_publish_tokens",
        "pages",
        "params",
        "peers",
        "phase",
        "prompt_tokens",
        "received_tokens",
        "request_id",
        "resumed",
        "sink",
        "started",
        "stop_after_tokens",
        "stop_ids",
        "token_s",
        "tokens",
        "ttft_deadline_s",
    )

    def __init__(
        self,
        new: NewRequest,
        *,
        context_length: int,
        eos_token_ids: frozenset[int],
        page_size: int,
        prefix_cache: bool,
        now: float,
        ttft_s: float = math.inf,
        export: HandoffId | None = None,
    ) -> None:
        """`export`: it is the prefill of another instance's request, of which this handoff takes the KV there."""
        params = new.params
        self.request_id = new.request_id
        self.sink = new.sink
        self.params = params
        self.host_sampled = params.host_sampled
        self.arrival = -1  # given when it is enqueued
        self.deadline_s = new.deadline_s
        self.ttft_deadline_s = now + ttft_s
        self.token_s = now  # when its last token came; before the first one, when it came itself
        self.tokens = [*new.prompt, *(new.generated or ())]
        self.prompt_tokens = len(new.prompt)
        self.given_tokens = len(self.tokens)  # known when it came: those of another instance are among them
        self.resumed = new.generated is not None
        self.computed_tokens = 0
        self.pages: list[int] = []
        self.started = False  # ever
        self.cached_tokens = 0  # prompt tokens that its first start found in the prefix cache
        self.likely_hit_tokens = 0  # by the prefix cache when it began to wait
        self.limit_tokens = min(context_length, self.prompt_tokens + params.max_tokens)
        self.peers = list(new.prefill_peers)  # that have not been tried yet
        self.fetch_deadline_s = min(_or_never(new.fetch_deadline_s), _or_never(new.deadline_s))
        self.exported = export is not None
        self.handoff = export  # else of the newest fetch
        self.received_tokens = 0  # by a fetch, while no token has been made from them
        self.stop_after_tokens = self.prompt_tokens + params.min_tokens  # up to this length a stop token is an ordinary one
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.phase = Phase.QUEUED
        self.history: list[tuple[float, Phase]] = [(now, Phase.QUEUED)]
        self._page_size = page_size
        self._published_pages = 0
        self._digests = [ROOT_DIGEST] if prefix_cache else []  # [0] is the root; [i + 1] is page i's
        self.next_publish_tokens = page_size if prefix_cache else 2**62  # `publish` has something to do from this length on
        self._digests += prompt_digests(new.prompt, page_size) if prefix_cache else ()

    @property
    def known_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def left_tokens(self) -> int:
        return self.limit_tokens - len(self.tokens)

    @property
    def stops_early(self) -> bool:
        return bool(self.stop_ids)

    @property
    def held_pages(self) -> int:
        return len(self.pages)

    @property
    def pinned(self) -> bool:
        return self.exported

    def move(self, phase: Phase, now: float) -> None:
        """Changes the phase; `now` in engine seconds. Raises IllegalMoveError with the history."""
        if phase not in LEGAL_MOVES[self.phase]:
            story = " > ".join(f"{moved.value}@{at:.3f}s" for at, moved in self.history)
            raise IllegalMoveError(
                f"request {self.request_id} cannot go from {self.phase.value} to {phase.value}; history: {story}"
            )
        self.phase = phase
        self.history.append((now, phase))

    def stage_s(self, now: float) -> tuple[float, float, float]:
        """Seconds since it came in which it waited, its KV came, and it was computed: all that there were."""
        begins = [*self.history, (now, self.phase)]
        spent = dict.fromkeys(Phase, 0.0)
        for (begin_s, phase), (end_s, _) in pairwise(begins):
            spent[phase] += end_s - begin_s
        return spent[Phase.QUEUED], spent[Phase.TRANSFER], spent[Phase.PREFILL] + spent[Phase.DECODE]

    @property
    def prefix_key(self) -> bytes | None:
        return self._digests[self._extend_to_last()] if self._digests else None

    def prefix_hit(self, pool: PagePool) -> Hit:
        """What the cache has of it, short of its last known token, which is always computed."""
        if not self._digests:
            return Hit((), 0, 0)
        return pool.match(self._digests[1 : self._extend_to_last() + 1])

    def start(self, hit: Hit, pool: PagePool) -> None:
        """Becomes a holder of the pages of a hit."""
        pool.share(hit)
        self.pages.extend(hit.pages)
        self.computed_tokens = hit.tokens
        if not self.started:
            self.cached_tokens = min(hit.tokens, self.prompt_tokens)
        self.started = True
        self._published_pages = len(hit.pages)
        if self._digests:
            self.next_publish_tokens = hit.tokens + self._page_size

    def publish(self, pool: PagePool) -> None:
        """Offers pages that have become full of computed tokens to the prefix cache."""
        full_pages = self.computed_tokens // self._page_size
        self._extend_digests(full_pages)
        for index in range(self._published_pages, full_pages):
            pool.publish(self.pages[index], self._digests[index + 1])
        self._published_pages = full_pages
        self.next_publish_tokens = (full_pages + 1) * self._page_size

    def give_up_pages(self, pool: PagePool) -> None:
        """Holds nothing and has computed nothing afterwards; what it published stays cached."""
        pool.release(self.pages)
        self.pages = []
        self.computed_tokens = self.received_tokens = 0
        self._published_pages = 0

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether the token that was just appended ends the request."""
        known = len(self.tokens)
        if token in self.stop_ids and known > self.stop_after_tokens:
            return FinishReason.STOP
        if known >= self.limit_tokens:
            return FinishReason.LENGTH
        return None

    def check_integrity(self, phase: Phase) -> None:
        """Checks its lengths and pages between two steps, for the phase whose queue it is in. Raises IntegrityError."""
        known, computed, held, size = self.known_tokens, self.computed_tokens, self.held_pages, self._page_size
        if phase is Phase.QUEUED:
            fits = computed == 0 and held == 0
        elif phase is Phase.TRANSFER and held == 0:
            fits = computed == 0
        elif phase in (Phase.PREFILL, Phase.TRANSFER):
            fits = computed < known and held == -(-known // size)
        else:
            fits = computed == known - 1 and -(-computed // size) <= held <= -(-known // size)
        if self.phase is not phase or not fits:
            raise IntegrityError(
                f"{self.phase.value} request {self.request_id} in the {phase.value} queue has {known} known and "
                f"{computed} computed tokens in {held} pages; history: {self.history}"
            )

    def _extend_to_last(self) -> int:
        """How many pages are full without the last known token; they have digests then."""
        full_pages = (len(self.tokens) - 1) // self._page_size
        self._extend_digests(full_pages)
        return full_pages

    def _extend_digests(self, full_pages: int) -> None:
        digests = self._digests
        if not digests:
            return
        size = self._page_size
        for index in range(len(digests) - 1, full_pages):
            digests.append(page_digest(digests[-1], self.tokens[index * size : (index + 1) * size]))


def _or_never(deadline_s: float | None) -> float:
    return math.inf if deadline_s is None else deadline_s
