"""Threads that compute on cores of their own, and the splits that they make possible.

Prefills get the first cores, decodes the last. Each worker has its own OpenMP team, whose threads inherit the worker's cores:
moving units between the lanes is handing the next piece of work to another worker. Lane and worker are independent: a lane's
pieces follow one another (who hands one in has waited for the one before), wherever they run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from typing import ParamSpec, TypeVar

import torch

from pdmux_ray.types import Split

MOST_SPLITS = 16  # a machine with many cores moves several at once: every worker's team has threads of its own
# Where something else wants the cores too (a gateway; with CAPPED the decodes), prefills give way before decodes do.
PREFILL_NICE = 5

P = ParamSpec("P")
R = TypeVar("R")


def splits_of(units: int) -> tuple[Split, ...]:
    """The disjoint ones of `units` cores, fewest decode units first."""
    stride = ceil(units / MOST_SPLITS)
    return tuple(Split(units - decode, decode) for decode in range(stride, units, stride))


class Worker:
    """A thread with the cores `cores`. Starts at once; raises OSError when it may not use them."""

    def __init__(self, name: str, cores: Sequence[int], nice: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.submit(_settle, cores, nice).result()

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs after everything that was submitted before. What it raises comes out of the future."""
        return self._thread.submit(work, *args, **kwargs)

    def close(self) -> None:
        """Waits for what was submitted, and for the thread."""
        self._thread.shutdown()


def _settle(cores: Sequence[int], nice: int) -> None:
    """Before the thread's first parallel region: its team is made there and inherits cores and niceness."""
    os.sched_setaffinity(0, cores)  # of this thread alone
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
    use_threads(len(cores))
    torch.zeros(2**20).add_(1)  # a parallel region


def use_threads(count: int) -> None:
    """How many threads the calling thread's parallel regions have."""
    torch.get_num_threads()  # torch sets up each thread on its first call, and would undo what was set before
    torch.set_num_threads(count)


class Workers:
    """One worker for each number of units a lane may have."""

    def __init__(self, cores: Sequence[int]) -> None:
        units = len(cores)
        self._whole = Worker("lane-all", cores, 0)
        self._prefill, self._decode = {units: self._whole}, {units: self._whole}
        for split in splits_of(units):
            p, d = split.prefill_units, split.decode_units
            self._prefill[p] = Worker(f"lane-prefill-{p}", cores[:p], PREFILL_NICE)
            self._decode[d] = Worker(f"lane-decode-{d}", cores[units - d :], 0)

    def prefill(self, split: Split) -> Worker:
        """Raises ValueError when no split of the device gives a prefill so many units."""
        return _choose(self._prefill, split.prefill_units, "prefill")

    def decode(self, split: Split) -> Worker:
        """Raises ValueError when no split of the device gives decodes so many units."""
        return _choose(self._decode, split.decode_units, "decode")

    def close(self) -> None:
        for worker in {*self._prefill.values(), *self._decode.values()}:
            worker.close()


def _choose(workers: dict[int, Worker], units: int, lane: str) -> Worker:
    worker = workers.get(units)
    if worker is None:
        raise ValueError(f"no {lane} lane has {units} units; there are lanes of {', '.join(map(str, sorted(workers)))}")
    return worker
