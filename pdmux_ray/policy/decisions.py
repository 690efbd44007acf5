"""What policies answer: frozen dataclasses with equality, each with its `Reason`.

A Reason's value is also the metric label, the log field and the simulator's column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StepReason(Enum):
    """Why a step is what it is."""

    IDLE = "idle"  # nothing to do
    PREEMPT = "preempt"  # the decodes could not grow: the newest requests give up their pages, and nobody starts
    DECODE_ONLY = "decode_only"  # nobody is waiting
    DECODE_NO_PAGES = "decode_no_pages"  # someone is waiting, but there are no pages for them
    DECODE_BATCH_FULL = "decode_batch_full"  # someone is waiting, but max_batch requests are running
    DECODE_NO_BUDGET = "decode_no_budget"  # chunked: the decodes alone use up the token budget
    PREFILL_WHOLE = "prefill_whole"  # prefill_first: prompts run whole, decode waits
    CHUNK_ONLY = "chunk_only"  # chunked: prefill with no decodes beside it
    CHUNK_MIXED = "chunk_mixed"  # chunked: decodes and prefill share the token budget


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute known tokens [start, start + tokens) of a request."""

    request_id: str
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: preempt, admit, then run decode and prefill together."""

    reason: StepReason
    decode: tuple[str, ...] = ()  # requests that compute their newest token and sample the next
    prefill: tuple[Chunk, ...] = ()  # a chunk that starts at 0 or at the prefix hit admits its request
    preempt: tuple[str, ...] = ()  # newest first: each gives up its pages and goes to the head of the queue


class Unfit(Enum):
    """Why an instance is given no requests."""

    NO_LINE = "no_line"  # its line is not up yet
    SILENT = "silent"  # nothing has come from it for too long
    STALLED = "stalled"  # the step under way takes too long
    AILING = "ailing"  # it says so itself
    LEAVING = "leaving"  # it is well, but about to end


class RouteReason(Enum):
    """Why a request went to its instance, or to none."""

    ONLY_ONE = "only_one"  # a single instance can take requests
    LEAST_LOADED = "least_loaded"  # it has the fewest requests, counted with those still on their way
    TIE = "tie"  # several have the fewest requests and the most free pages; one was drawn
    NONE_LINKED = "none_linked"  # no instance is known
    NONE_FIT = "none_fit"  # there are instances, but none can take requests


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Which instance serves a request; None with the reasons NONE_LINKED and NONE_FIT, and only with them."""

    instance_id: str | None
    reason: RouteReason
