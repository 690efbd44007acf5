"""Whether the client itself can be believed: how late it sent, and how long its event loop stood still.

A loop that stands still reads no socket, so tokens that come meanwhile get the time of its end. What counts is therefore not
how many stalls there were but the share of the run that they took: about that share of the tokens has a wrong time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdmux_ray.metrics.lifeline import Lifeline, quantile

TICK_S = 0.005  # how often the loop is looked at
MAX_STALLED = 0.01  # of the run: one token in a hundred, which a p99 can bear
MIN_LATENESS_S = 0.010


@dataclass(slots=True)
class LoopWatch:
    """A task that sleeps `TICK_S` again and again, and notes how much longer it took. Owner: one run, on its loop."""

    tolerance_s: float
    longest_s: float = 0.0
    stalled_s: float = 0.0  # in stalls longer than the tolerance
    watched_s: float = 0.0  # all the time

    async def run(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.note(time.perf_counter() - before_s)

    def note(self, slept_s: float) -> None:
        """A sleep that should have taken `TICK_S`."""
        lag_s = slept_s - TICK_S
        self.watched_s += slept_s
        self.longest_s = max(self.longest_s, lag_s)
        if lag_s > self.tolerance_s:
            self.stalled_s += lag_s

    @property
    def stalled_share(self) -> float:
        """Of the run."""
        return self.stalled_s / self.watched_s if self.watched_s else 0.0


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """This thread runs as soon as it has something to do, where the system permits that (a superuser on Linux).

    A client has a machine of its own as a rule; one that shares its cores with the server must not wait for them, or it would
    time the scheduler. It takes a few percent of a core. Processes that it starts do not inherit it.
    """
    before = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    try:
        if before is not None:
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        yield
    finally:
        if before is not None:
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, before, os.sched_param(0))


def lateness_tolerance_s(due_s: Sequence[float]) -> float:
    """For the 99th percentile of sent minus planned: 5 % of the mean gap between arrivals, so that the process offered is the
    one that was planned; at least 10 ms, which no latency SLO of today notices."""
    if len(due_s) < 2:
        return MIN_LATENESS_S
    return max(MIN_LATENESS_S, 0.05 * (max(due_s) - min(due_s)) / (len(due_s) - 1))


def lateness_p99_s(lifelines: Sequence[Lifeline]) -> float:
    """0 when none was sent."""
    late_s = sorted(lag for lifeline in lifelines if (lag := lifeline.sent_s - lifeline.due_s) == lag)  # not NaN
    return quantile(late_s, 0.99) if late_s else 0.0


def most_connections() -> None:
    """As many open files as this process may have: each request under way is one, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def judged(late_s: float, tolerance_s: float, looked: LoopWatch, unconnected: int = 0) -> str | None:
    """Why a run must not be used. None: it may. `unconnected`: requests for which this machine had no connection left."""
    if unconnected:
        return (
            f"the client had no connection left for {unconnected} requests (files, ports or memory): raise its limits, "
            "such as that of open files (ulimit -n), or offer less"
        )
    troubles = []
    if late_s > tolerance_s:
        troubles.append(
            f"the client sent late: p99 {late_s * 1e3:.1f} ms after the planned time, {tolerance_s * 1e3:.1f} ms are tolerated"
        )
    if (share := looked.stalled_share) > MAX_STALLED:
        troubles.append(
            f"the client could not keep up: its loop stood still for {share:.1%} of the run, {MAX_STALLED:.0%} is tolerated "
            f"(counting stalls over {looked.tolerance_s * 1e3:.0f} ms; the longest took {looked.longest_s * 1e3:.0f} ms)"
        )
    return "; ".join([*troubles, "give the client a core of its own, or offer less"]) if troubles else None


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without the garbage collector's pauses; a run makes few cycles, and its time is limited."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
