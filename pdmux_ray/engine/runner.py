"""The seam between the control plane and a device: what a step asks for, and what comes back.

The engine calls `launch` and then `collect`, from one thread. A runner never changes a request or a page's owner; it reads
tokens and page numbers, writes KV into those pages, and answers with sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdmux_ray.types import SamplingParams, TokenLogprobs


class SequenceView(Protocol):
    """A request as a runner sees it; stable between `launch` and `collect`."""

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]:
        """Known token ids: prompt, then generated."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the original prompt (also after a preemption)."""

    @property
    def pages(self) -> Sequence[int]:
        """Page table: page numbers that cover at least every token this step computes, in order."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it: its own stop tokens, and the model's end tokens unless it ignores them."""


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Compute known tokens [start, start + tokens) of `sequence`. KV of [0, start) is already in its pages.

    `sample`: this slice reaches the last known token, so its logits yield the next token.
    """

    sequence: SequenceView
    start: int
    tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything a device computes in one step.

    Each of `decodes` computes its last known token (position len(tokens) - 1) and samples the next.
    """

    decodes: Sequence[SequenceView]
    prefills: Sequence[PrefillSlice]


@dataclass(slots=True)
class StepOutput:
    """Sampled tokens, in the order: every decode, then every prefill slice with `sample` set.

    `logprobs` is aligned with `tokens`, or empty when no request of the step asked for any.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


GiveUp = Callable[[], bool]


def never() -> bool:
    """A step that runs to its end whatever happens."""
    return False


class Runner(Protocol):
    """A device that runs steps."""

    @property
    def pages(self) -> int:
        """Number of KV pages the device holds; page numbers are 0 .. pages - 1."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    def launch(self, batch: StepBatch, give_up: GiveUp = never) -> None:
        """Starts a step. May return before it has been computed.

        A step with prefills asks `give_up` between blocks of layers, in the calling thread, at least every few ten
        milliseconds; when it answers True the rest of the step is not computed, and nothing of it counts.
        """

    def collect(self) -> StepOutput | None:
        """Waits for the launched step and returns its tokens; None when it was given up."""

    def close(self) -> None:
        """Frees the device. Safe to call twice."""
