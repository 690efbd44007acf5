"""What the real streams ask of the driver, as far as a machine without a GPU can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from pdmux_ray.device.cuda.driver import CudaError, CudaUnavailableError, Driver
from pdmux_ray.device.cuda.streams import CudaStreams, kernel_contexts

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


def test_without_a_driver_there_are_no_streams_and_the_error_says_what_runs_instead() -> None:
    with pytest.raises(CudaUnavailableError, match=r"configs/cpu-mux.yaml"):
        CudaStreams()
