"""The streams of a GPU whose lanes are green contexts: `streams.Streams` over torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from pdmux_ray.device.cuda.driver import Driver, open_driver, widen_queues
from pdmux_ray.device.cuda.green_context import Partition, make_partitions
from pdmux_ray.device.cuda.streams import Event, Graph, Stream, Work
from pdmux_ray.types import Split

_untyped: Any = torch.cuda  # its classes' constructors have no types


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


class GraphPool:
    """Memory that captured graphs share: those of one lane, which never run at the same time.

    torch takes a pool for dead when its last graph is, and then fails every capture into it. So one graph, which is never
    replayed, stays as long as the pool.
    """

    def __init__(self, handle: Any, stream: Any, number: Tensor) -> None:
        """`handle`, `stream`: torch's. `number`: on the device, of any shape; it is changed."""
        self._handle = handle
        with torch.cuda.stream(stream):
            number.add_(1)  # loads the kernel, which a capture must not
            self._held = self.capture(lambda: number.add_(1))

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """On the current stream. Kept beside its executable form, so that its nodes can be looked at. Other threads may call
        CUDA meanwhile. Raises what `work` raises."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # it would only say that what was captured is not valid
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


class CudaStream:
    """A `Stream` over torch's. `stream` belongs to the partition, which outlives it; the current context stays the primary one.
    `pool`: its lane's."""

    def __init__(self, stream: Any, context: int, units: int, carveout: int | None, pool: GraphPool) -> None:
        """`stream`: torch's; None: the current one. `carveout`: how many SMs of the device matrix products should leave alone;
        None: the hint is not set."""
        self.units, self.context = units, context
        self._stream, self._carveout, self._pool = stream, carveout, pool

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def run(self, work: Work) -> None:
        with self._current():
            work()

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        with self._current():
            graph = self._pool.capture(work)
        graph.instantiate()
        return graph

    @contextmanager
    def _current(self) -> Iterator[None]:
        """What is launched here goes to this stream, with the hint. That is global, and read when a product is launched or
        captured: one thread launches all that both lanes do."""
        with torch.cuda.stream(self._stream):
            torch._C._set_sm_carveout_experimental(self._carveout)
            try:
                yield
            finally:
                torch._C._set_sm_carveout_experimental(None)

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        with torch.cuda.stream(self._stream):
            graph.replay()


def left_alone(units: int, partition: Partition) -> int | None:
    """How many of the device's `units` matrix products on a partition should leave alone; None when it has them all."""
    return units - partition.units or None


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
        alone_on, copies_on = _untyped.Stream(self.device), _untyped.Stream(self.device)
        number = torch.zeros(1, device=self.device)
        decodes, prefills = (GraphPool(torch.cuda.graph_pool_handle(), alone_on, number) for _ in range(2))
        self.settle()  # before others may have `number`'s memory
        whole, context = self._of(partitions.whole, decodes), partitions.whole.context
        alone = CudaStream(alone_on, context, self.units, None, prefills)
        self.whole: Stream = whole
        self.copies: Stream = CudaStream(copies_on, context, self.units, None, prefills)
        pairs = partitions.lanes.values()
        self._prefill = {prefill: self._of(prefill, prefills) for prefill, _ in pairs} | {partitions.whole: alone}
        self._decode = {decode: self._of(decode, decodes) for _, decode in pairs} | {partitions.whole: whole}

    def _of(self, partition: Partition, pool: GraphPool) -> CudaStream:
        stream = _untyped.ExternalStream(partition.stream, device=self.device)
        return CudaStream(stream, partition.context, partition.units, left_alone(self.units, partition), pool)

    def decode(self, split: Split) -> Stream:
        return self._decode[self.partitions.decode(split)]

    def prefill(self, split: Split) -> Stream:
        return self._prefill[self.partitions.prefill(split)]

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
