"""What the cores give: bytes and floating point operations a second, for each number of them. Imports torch when called.

One pinned thread on each core, so that nothing of an intra-op pool is in the way; all begin together, and the time is that of
the last one.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

TRIAD_FLOATS = 4 * 2**20  # of each of three arrays a core: 48 MiB a core, more than the caches
GEMM = (512, 576, 1536)
TURNS = 8


def probe(levels: Sequence[int], dtype: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes a second, floating point operations a second), aligned with `levels`, numbers of cores. Takes about a second."""
    import torch

    kind = getattr(torch, dtype)
    rows, inner, columns = GEMM

    def triad() -> Callable[[], object]:
        torch.set_num_threads(1)  # of this thread's operations alone
        a, b, c = (torch.ones(TRIAD_FLOATS) for _ in range(3))
        return lambda: torch.add(b, c, alpha=3.0, out=a)

    def gemm() -> Callable[[], object]:
        torch.set_num_threads(1)
        a, b = torch.ones(rows, inner, dtype=kind), torch.ones(inner, columns, dtype=kind)
        out = torch.empty(rows, columns, dtype=kind)
        return lambda: torch.mm(a, b, out=out)

    moved, computed = 12.0 * TRIAD_FLOATS, 2.0 * rows * inner * columns
    return (
        tuple(level * moved / _seconds(triad, level) for level in levels),
        tuple(level * computed / _seconds(gemm, level) for level in levels),
    )


def _seconds(make: Callable[[], Callable[[], object]], threads: int) -> float:
    """Of one turn, on so many cores at once; the median of TURNS, after one that does not count."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    barrier = threading.Barrier(threads)
    begins, ends = ([[0.0] * TURNS for _ in cores] for _ in range(2))

    def work(index: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {cores[index]})
        turn = make()
        turn()
        for i in range(TURNS):
            barrier.wait()
            begins[index][i] = time.perf_counter()
            turn()
            ends[index][i] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    spans = zip(zip(*begins, strict=True), zip(*ends, strict=True), strict=True)
    return float(statistics.median([max(ended) - min(begun) for begun, ended in spans]))
