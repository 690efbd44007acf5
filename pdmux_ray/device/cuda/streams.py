"""What the runner asks of CUDA: streams that belong to some SMs, events that order them, graphs of what they do.

    run, replay      put work at the end of a stream and return at once
    record, wait_for order streams on the device: what follows `b.wait_for(a.record())` on b follows what a had before
    event.wait       the host waits; only for values that it must read, never to order the lanes

`CudaStreams` is the real thing; `recording.RecordingStreams` does the same on a CPU, in the worst order that the events allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pdmux_ray.device.cuda.driver import Driver, open_driver, widen_queues
from pdmux_ray.device.cuda.green_context import Partition, make_partitions
from pdmux_ray.types import Split

Work = Callable[[], None]
S = TypeVar("S")

_untyped: Any = torch.cuda  # its classes' constructors have no types


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


class Streams(Protocol):
    """The streams of one device. All of them live as long as the process."""

    name: str  # of the device
    device: torch.device
    units: int  # SMs of the device
    splits: Sequence[Split]  # with the SMs that the device really gave; fewest decode units first
    whole: Stream  # decodes on every SM
    copies: Stream  # inputs of prefills go to the device here, beside both lanes

    def decode(self, split: Split) -> Stream:
        """Of so many decode units; `whole` when those are all. Raises ValueError when no split has so many."""

    def prefill(self, split: Split) -> Stream:
        """Of so many prefill units; disjoint from `decode(split)` when the split is. Raises ValueError when no split has so
        many."""

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


def choose(streams: Mapping[int, S], units: int, lane: str) -> S:
    """Raises ValueError when the lane has no stream of so many units."""
    if units not in streams:
        raise ValueError(f"no {lane} lane has {units} units; there are lanes of {', '.join(map(str, sorted(streams)))}")
    return streams[units]


class CudaEvent:
    """An `Event` over torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = _untyped.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A `Stream` over torch's. `stream` belongs to the partition, which outlives it; the current context stays the primary one.

    Captured graphs share the memory pool of their lane, `pool`: those of one lane never run at the same time.
    """

    def __init__(self, stream: torch.cuda.Stream, context: int, units: int, carveout: int | None, pool: Any) -> None:
        """`carveout`: how many SMs of the device matrix products should leave alone; None: the hint is not set."""
        self.units, self.context = units, context
        self._stream, self._carveout, self._pool = stream, carveout, pool

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream), _carved_out(self._carveout):
            work()

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Kept beside its executable form, so that its nodes can be looked at. Other threads may call CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._stream), _carved_out(self._carveout):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        graph.instantiate()
        return graph

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        with torch.cuda.stream(self._stream):
            graph.replay()


@contextmanager
def _carved_out(units: int | None) -> Iterator[None]:
    """The hint is global, and read when a product is launched or captured: one thread launches all that both lanes do."""
    torch._C._set_sm_carveout_experimental(units)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


class CudaStreams:
    """`Streams` of a GPU whose partitions are green contexts."""

    def __init__(self, device_index: int = 0, asked: Sequence[tuple[int, int]] | None = None) -> None:
        """`asked`: (prefill, decode) SMs of each split; None: see `splits.feasible_splits`.

        Raises CudaUnavailableError, CudaError, or ConfigError for a split that is not feasible.
        """
        widen_queues()
        self._driver: Driver = open_driver()
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)
        torch.cuda.current_stream().synchronize()  # makes the primary context, before any green one
        partitions = self.partitions = make_partitions(device_index, asked)
        self.splits: Sequence[Split] = partitions.splits
        self.units = partitions.whole.units
        decodes, prefills = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        whole, context = self._of(partitions.whole, decodes), partitions.whole.context
        alone = CudaStream(_untyped.Stream(self.device), context, self.units, None, prefills)
        self.whole: Stream = whole
        self.copies: Stream = CudaStream(_untyped.Stream(self.device), context, self.units, None, prefills)
        splits = partitions.splits
        self._decode = {s.decode_units: self._of(partitions.decode(s), decodes) for s in splits} | {self.units: whole}
        self._prefill = {s.prefill_units: self._of(partitions.prefill(s), prefills) for s in splits} | {self.units: alone}

    def _of(self, partition: Partition, pool: Any) -> CudaStream:
        rest = self.units - partition.units
        stream = _untyped.ExternalStream(partition.stream, device=self.device)
        return CudaStream(stream, partition.context, partition.units, rest or None, pool)

    def decode(self, split: Split) -> Stream:
        return choose(self._decode, split.decode_units, "decode")

    def prefill(self, split: Split) -> Stream:
        return choose(self._prefill, split.prefill_units, "prefill")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """What torch holds in reserve counts as used: lanes and jobs will take it again."""
        return torch.cuda.mem_get_info(self.device)[0]

    def node_contexts(self, graph: Graph) -> set[int]:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        return kernel_contexts(self._driver, graph.raw_cuda_graph())

    def context(self, stream: Stream) -> int:
        assert isinstance(stream, CudaStream)
        return stream.context


def kernel_contexts(driver: Driver, graph: Any) -> set[int]:
    """Of all kernel nodes of a CUgraph, those in child graphs among them. Raises CudaError."""
    kinds = driver.bindings.CUgraphNodeType
    count = driver.call("cuGraphGetNodes", graph)[1]
    found: set[int] = set()
    for node in driver.call("cuGraphGetNodes", graph, count)[0]:
        kind = driver.call("cuGraphNodeGetType", node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            found.add(int(driver.call("cuGraphKernelNodeGetParams", node).ctx))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            found |= kernel_contexts(driver, driver.call("cuGraphChildGraphNodeGetGraph", node))
    return found
