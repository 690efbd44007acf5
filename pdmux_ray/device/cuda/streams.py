"""What the runner asks of CUDA: streams that belong to some SMs, events that order them, graphs of what they do.

    run, replay      put work at the end of a stream and return at once
    record, wait_for order streams on the device: what follows `b.wait_for(a.record())` on b follows what a had before
    event.wait       the host waits; only for values that it must read, never to order the lanes

`cuda_streams.CudaStreams` is the real thing; `recording.RecordingStreams` does the same on a CPU, in the worst order that the
events allow. Both find the streams of a split by `green_context.Partitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from pdmux_ray.types import Split

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Never waits."""

    def wait(self) -> None:
        """Blocks the calling thread until the stream has passed it. Raises what the work before it failed with."""

    def seconds_since(self, earlier: Event) -> float:
        """Between the moments at which the streams passed the two; both must be done."""


class Graph(Protocol):
    """What `Stream.capture` returns; opaque."""


class Stream(Protocol):
    """A queue of work that runs in order. `units`: the SMs it runs on. One thread at a time.

    Work reads and writes tensors that are there already; it may run later than the call. The hint of how many SMs matrix
    products should use is set around it.
    """

    @property
    def units(self) -> int: ...

    def record(self) -> Event: ...

    def wait_for(self, event: Event) -> None: ...

    def run(self, work: Work) -> None: ...

    def capture(self, work: Work) -> Graph:
        """Takes down what `work` would do, without doing it. The same work must have run on this stream before."""

    def replay(self, graph: Graph) -> None:
        """Puts all of a graph's work into the stream, in one call."""


@contextmanager
def ended_if_it_fails(stream: Stream) -> Iterator[None]:
    """Around a launch of several pieces of work. When it raises amid them, the host waits for those that are in the stream:
    whoever is told of the error gives the memory that they write to others."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # what the work failed with; the launch's own error says more
            stream.record().wait()
        raise


class Streams(Protocol):
    """The streams of one device. All of them live as long as the process."""

    name: str  # of the device
    device: torch.device
    units: int  # SMs of the device
    splits: Sequence[Split]  # with the SMs that the device really gave; fewest decode units first
    whole: Stream  # decodes on every SM
    copies: Stream  # inputs of prefills go to the device here, beside both lanes

    def decode(self, split: Split) -> Stream:
        """Of the split's decode units; `whole` when those are all. Raises ValueError when the device was not divided so."""

    def prefill(self, split: Split) -> Stream:
        """Of the split's prefill units; disjoint from `decode(split)` when the split is. Where decodes have every unit, those
        of any split that has so many. Raises ValueError when the device was not divided so."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor on the host that the device copies from and to by itself."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the device that holds anything."""

    def settle(self) -> None:
        """Waits for what was put on the device outside of these streams (weights, zeros), which nothing else orders before
        them; gives back memory that is not in use. At the start only."""

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""

    def node_contexts(self, graph: Graph) -> set[int]:
        """The contexts that a graph's kernels were captured in; 0 where the driver names none."""

    def context(self, stream: Stream) -> int:
        """The context that a stream's kernels belong in."""
