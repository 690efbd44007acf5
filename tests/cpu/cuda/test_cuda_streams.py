"""What the real streams ask of the driver, as far as a machine without a GPU can tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from cuda.bindings import driver as cuda

from pdmux_ray.device.cuda.cuda_streams import CudaStream, CudaStreams, GraphPool, kernel_contexts, left_alone
from pdmux_ray.device.cuda.driver import CudaError, Driver
from pdmux_ray.device.cuda.recording import divided
from pdmux_ray.device.gpus import has_gpu
from pdmux_ray.errors import CudaUnavailableError
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu

KINDS = cuda.CUgraphNodeType
SUCCESS, INVALID = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_INVALID_VALUE


class FakeGraphs:
    """The driver's calls about graphs. A graph is a list of nodes: a kernel is its context (an int), a copy is None, a child
    graph a list."""

    CUgraphNodeType = KINDS

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return SUCCESS, 13_010

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> tuple[Any, list[Any], int]:
        if not isinstance(graph, list):
            return INVALID, [], 0
        return SUCCESS, graph[:count], len(graph) if count == 0 else count

    def cuGraphNodeGetType(self, node: Any) -> tuple[Any, Any]:
        if node is None:
            return SUCCESS, KINDS.CU_GRAPH_NODE_TYPE_MEMCPY
        return SUCCESS, KINDS.CU_GRAPH_NODE_TYPE_KERNEL if isinstance(node, int) else KINDS.CU_GRAPH_NODE_TYPE_GRAPH

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, Any]:
        return SUCCESS, SimpleNamespace(ctx=cuda.CUcontext(node))

    def cuGraphChildGraphNodeGetGraph(self, node: list[Any]) -> tuple[Any, Any]:
        return SUCCESS, node


@pytest.mark.parametrize(
    ("graph", "contexts"),
    [
        ([], set()),
        ([None], set()),
        ([7, None, 7], {7}),
        ([7, [7, [9], None], 7], {7, 9}),
        ([7, 0], {0, 7}),
    ],
)
def test_the_contexts_of_a_graph_are_those_of_all_its_kernels(graph: list[Any], contexts: set[int]) -> None:
    assert kernel_contexts(Driver(FakeGraphs()), graph) == contexts


def test_a_graph_that_the_driver_refuses_is_an_error_that_names_the_call() -> None:
    with pytest.raises(CudaError, match="cuGraphGetNodes failed with CUDA_ERROR_INVALID_VALUE"):
        kernel_contexts(Driver(FakeGraphs()), "no graph")


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_driver_there_are_no_streams_and_the_error_says_what_runs_instead() -> None:
    with pytest.raises(CudaUnavailableError, match=r"configs/cpu-mux.yaml"):
        CudaStreams()


class FakeGraph:
    """torch.cuda.CUDAGraph, as far as a capture goes. As torch's, it refuses a pool whose graphs have all died, and its capture
    ends with an error when what was captured is not valid."""

    pools: ClassVar[dict[Any, weakref.WeakSet[FakeGraph]]] = {}
    valid = True

    def __init__(self, keep_graph: bool) -> None:
        self.calls: list[Any] = [("made", keep_graph)]

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool not in self.pools or len(self.pools[pool]) > 0, "use_count > 0 INTERNAL ASSERT FAILED"
        self.pools.setdefault(pool, weakref.WeakSet()).add(self)
        self.calls.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.calls.append("end")
        if not self.valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def instantiate(self) -> None:
        self.calls.append("instantiated")

    def replay(self) -> None:
        self.calls.append("replayed")


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """The class of those that are made, with no pools yet."""

    class Graph(FakeGraph):
        pools: ClassVar[dict[Any, weakref.WeakSet[FakeGraph]]] = {}

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph


def hint() -> int | None:
    return torch._C._get_sm_carveout_experimental()


def fail() -> None:
    raise IndexError


def lane(carveout: int | None, pool: object = None) -> CudaStream:
    pool = object() if pool is None else pool
    return CudaStream(None, context=7, units=24, carveout=carveout, pool=GraphPool(pool, None, torch.zeros(1)))


HOW: list[Callable[[CudaStream], Any]] = [lambda stream: stream.run, lambda stream: stream.capture]


@pytest.mark.parametrize("how", HOW, ids=["launched", "captured"])
@pytest.mark.parametrize("carveout", [108, None])
def test_products_of_a_lane_are_told_how_many_sms_to_leave_alone_and_nobody_elses_are(
    how: Callable[[CudaStream], Any], carveout: int | None
) -> None:
    seen: list[int | None] = []
    how(lane(carveout))(lambda: seen.append(hint()))
    assert seen == [carveout]
    assert hint() is None
    with pytest.raises(IndexError):
        how(lane(carveout))(fail)
    assert hint() is None


def test_a_lane_leaves_alone_the_sms_that_are_not_its_own() -> None:
    partitions = divided(132, [Split(108, 24)])
    ((prefill, decode),) = partitions.lanes.values()
    assert [left_alone(132, part) for part in (prefill, decode, partitions.whole)] == [24, 108, None]


def test_a_capture_keeps_its_nodes_in_the_pool_of_its_lane_and_lets_other_threads_call_cuda() -> None:
    stream = lane(108, "pool")
    graph: Any = stream.capture(lambda: None)
    stream.replay(graph)
    assert graph.calls == [("made", True), ("begin", "pool", "thread_local"), "end", "instantiated", "replayed"]


def test_a_lane_captures_again_when_all_its_graphs_have_died(graphs: type[FakeGraph]) -> None:
    stream = lane(108, "pool")
    first = weakref.ref(stream.capture(lambda: None))
    assert first() is None
    stream.capture(lambda: None)
    assert len(graphs.pools["pool"]) == 1


def test_a_capture_that_fails_is_ended_and_raises_what_it_failed_of(
    graphs: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, made = lane(108, "pool"), list[FakeGraph]()

    def fail_amid_it() -> None:
        made.extend(graph for graph in graphs.pools["pool"] if graph.calls[-1] != "end")
        raise IndexError

    monkeypatch.setattr(graphs, "valid", False)
    with pytest.raises(IndexError):
        stream.capture(fail_amid_it)
    assert [graph.calls[-1] for graph in made] == ["end"]
