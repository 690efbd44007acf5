"""What a policy may see: read-only protocols over the engine's live structures (no copies on the step path)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RequestView(Protocol):
    """A request as a policy sees it. Lengths in tokens."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrival(self) -> int:
        """Order of arrival: smaller is older. Kept through preemptions."""

    @property
    def known_tokens(self) -> int:
        """Prompt plus generated so far."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in the request's pages. Always < known_tokens."""

    @property
    def held_pages(self) -> int: ...


class PrefixHit(Protocol):
    """What the prefix cache has for a waiting request."""

    @property
    def tokens(self) -> int:
        """Leading tokens already in cached pages (whole pages, always < known_tokens)."""

    @property
    def evictable_pages(self) -> int:
        """How many of those pages nobody holds now: taking them lowers `EngineView.free_pages`."""


class EngineView(Protocol):
    """One instance between two steps."""

    @property
    def page_size(self) -> int: ...

    @property
    def free_pages(self) -> int:
        """Pages that can be had now: free, or cached and held by nobody."""

    @property
    def decoding(self) -> Sequence[RequestView]:
        """Requests in phase DECODE, oldest arrival first."""

    @property
    def prefilling(self) -> Sequence[RequestView]:
        """Requests in phase PREFILL (they hold all pages of their known tokens), oldest arrival first."""

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests in phase QUEUED, in the order in which they should start."""

    def prefix_hit(self, request: RequestView) -> PrefixHit:
        """Looks up a waiting request's prefix. Changes nothing."""

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        """By how much `free_pages` would rise if all of these gave up their pages. Changes nothing.

        A shared page counts when everyone who holds it is among `requests`.
        """


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as a gateway sees it: the newest load figures it was told, and what it has sent since."""

    instance_id: str
    running: int
    waiting: int
    free_pages: int
    step_age_s: float  # of the step under way when the figures were told; 0 without one
    silence_s: float  # since they were told
    on_their_way: int  # requests sent whose receipt the figures do not show yet
    line_is_up: bool  # False: there are no figures yet
    leaving: bool  # it takes no more requests, but ends those it has
    ailing: bool  # it says itself that it is not well
