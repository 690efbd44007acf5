"""The seam between the control plane and a device: what a step asks for, and what comes back.

The engine calls `launch` and then `collect`, once for each step, from one thread. A runner never changes a request or a page's
owner; it reads tokens and page numbers, writes KV into those pages, and answers with sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pdmux_ray.types import SamplingParams, Split, TokenLogprobs


class SequenceView(Protocol):
    """A request as a runner sees it; stable between `launch` and the first `collect` (amid a burst its tokens grow)."""

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
    """Everything a device computes in one step, or in a burst of `steps` decode steps.

    Each of `decodes` computes its last known token (position len(tokens) - 1) and samples the next. In a burst the device goes
    on with that one by itself, whether it ends its request or not: the host throws away what comes after an end. There are no
    prefills in a burst, no `params.host_sampled`, and its pages cover the tokens of all its steps.
    """

    decodes: Sequence[SequenceView]
    prefills: Sequence[PrefillSlice]
    steps: int = 1


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
        """Starts a step. May return before it has been computed. When it raises, the device writes no more of the step: its
        requests' pages go to others.

        A step with prefills asks `give_up` between blocks of layers, in the calling thread, at least every few ten
        milliseconds; when it answers True the rest of the step is not computed, and nothing of it counts.
        """

    def collect(self) -> StepOutput | None:
        """Waits for the launched step and returns its tokens; None when it was given up."""

    def close(self) -> None:
        """Frees the device. Safe to call twice."""


@runtime_checkable
class LayeredRunner(Runner, Protocol):
    """A device that has come to the end of some layers of a pass, KV and all, when it asks `give_up`."""

    @property
    def layers_done(self) -> int:
        """Of the pass under way. KV of its prefills in them may be read by others already."""


@runtime_checkable
class LaneRunner(Runner, Protocol):
    """A device with two lanes that run at the same time and share the KV pool. Called from one thread, as a `Runner` is.

    Without a split `launch` uses every unit; no block may be in flight then. With one, `launch` runs its batch (decodes only)
    on the decode lane, and up to one block runs on the prefill lane meanwhile. What a job wrote may be read by others only
    after `collect_block` has returned for its last block: that wait is the event that orders the lanes.

    A burst: `launch` reads all it needs of the batch and returns; each of its `steps` calls of `collect` waits for one step and
    returns its tokens as soon as they are there. When one raises, the whole burst has ended: the device writes no more of it.
    """

    @property
    def most_steps(self) -> int:
        """Of a burst. 1: it takes no bursts."""

    @property
    def layers(self) -> int: ...

    @property
    def units(self) -> int:
        """Streaming multiprocessors, or cores."""

    @property
    def splits(self) -> Sequence[Split]:
        """The disjoint ones, made once at the start, fewest decode units first. Empty with a single unit."""

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None: ...

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        """A prefill that will run by layer blocks. Its tokens and pages are read now and may not change until it ends."""

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        """Starts the job's layers up to `end_layer` on the split's prefill units and returns at once. No other block may be
        in flight. The block that reaches the last layer also samples. When it raises, the job rests, and the device writes no
        more of it."""

    def block_done(self) -> bool:
        """Whether the block in flight has been computed; True while there is none. Never waits."""

    def collect_block(self) -> StepOutput | None:
        """Waits for the block in flight. The sampled tokens (of the slices with `sample`) when it was its job's last, which
        ends the job; None before. Raises what the block failed with; the job has ended then."""

    @property
    def block_s(self) -> float:
        """What the last collected block took, from its launch to its own end (not to `collect_block`, which may come late).

        A device that orders its lanes itself waits here for that end, and raises what the block failed with; the job has ended
        then.
        """

    def drop_job(self, job_id: int) -> None:
        """Ends a job of which no block is in flight; nothing of it counts."""
