"""A request as a workload plans it. Knows nothing of servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks. Token ids, so that lengths are exact and shared prefixes are real; or a text of one's own."""

    prompt: tuple[int, ...] | str
    output_tokens: int | None  # exactly so many (end tokens are ignored); None: the model decides
    trace_s: float | None = None  # when it came in the trace, from the trace's first request


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """An ask and its place in a run."""

    index: int  # in order of due_s
    due_s: float  # from the run's start
    ask: Ask


class Planned(Protocol):
    """The requests of a run in order. Each may be made when it is looked at: `arrivals.LazyPlan`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PlannedRequest: ...

    def __iter__(self) -> Iterator[PlannedRequest]: ...


class Workload(Protocol):
    """A source of asks."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> Sequence[str]:
        """Lines for the report: where the numbers come from, and every rule that changed them (scaling, caps)."""

    def asks(self, count: int, seed: int) -> list[Ask]:
        """The same ones for the same arguments; the first n of `count` are the ones that n asks for (a prefix)."""
