"""`python -m pdmux_ray.bench.transfer`: how fast KV pages move between two processes, by our transport and by bare NIXL.

The same bytes in the same pages, to random places on the same link, by turns: a write through `NixlTransport`, its note at the
peer, and the same with NIXL's own calls and nothing around them. A run counts from before the write is made to when the writer
knows that it is over: bare NIXL is asked without a pause, which takes a core; `core` is what ours takes of one. The table has
the median of each, and the share of bare NIXL's throughput that ours has: the median of the pairs, with its 95 % interval.
Writes are cut as a push cuts them, at most `--write` MiB each, and are posted all at once. `--tls` chooses UCX's transports:
the default is what two instances of one machine use; `tcp,self` is TCP even there. Exit status 1: a share below the target.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from kv_transfer.api import Indices, Limits, PeerUp, TransportEvent, Write, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.messages import compatibility
from kv_transfer.nixl import Identity, NixlTransport
from kv_transfer.nixl_agent import Agent, Pool
from kv_transfer.plan import descriptors, grid
from pdmux_ray.bench import paired
from pdmux_ray.report.progress import Progress

MIB = 2**20
TARGET = 0.85
PATIENCE_S = 60.0
SMALL_REPEATS = 200  # of the smallest transfers, which anything else on the machine disturbs


@dataclass(frozen=True, slots=True)
class Case:
    size_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one transfer each; `cpu_s`: that the thread which drives ours was computing."""

    case: Case
    ours_s: list[float]
    cpu_s: list[float]
    bare_s: list[float]

    @property
    def cpu(self) -> float:
        """Of one core, while ours is under way. What it waits for, NIXL's own thread does."""
        return sum(self.cpu_s) / sum(self.ours_s)

    @property
    def share(self) -> paired.Ratio:
        """Of bare NIXL's throughput."""
        return paired.ratio(self.bare_s, self.ours_s)


def layout_of(case: Case) -> KVLayout:
    """A pool of one layer that holds the transfer, keys in one half and values in the other."""
    pages = case.size_bytes // case.page_bytes // 2
    return KVLayout(layers=1, pages=pages, kv_heads=1, page_size=16, head_dim=case.page_bytes // 32, dtype_bytes=2)


def transport(name: str, layout: KVLayout, memory: NDArray[np.uint8]) -> NixlTransport:
    """The writer does not look at its own while bare NIXL writes, which is no silence."""
    same = compatibility("bench", "bfloat16", layout, "bench")
    return NixlTransport(Identity(name, same, "bench"), layout, Pool.of(memory), limits=Limits(silence_s=PATIENCE_S))


def until(end: NixlTransport, done: Callable[[TransportEvent], bool], times: int = 1) -> None:
    """Raises TimeoutError when it does not happen so many times."""
    deadline = time.monotonic() + PATIENCE_S
    while times > 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other process has not answered within {PATIENCE_S:g} s: run it again")
        times -= sum(done(event) for event in end.poll())
        if times > 0:
            end.wait(0.1)


def receive(parent: Connection, layout: KVLayout, tls: str) -> None:
    """The process that is written to. First over our transport, then, by its own agent, over bare NIXL; until told to stop."""
    os.environ["UCX_TLS"] = tls
    memory = np.zeros(layout.total_bytes, dtype=np.uint8)
    pool = Pool.of(memory)
    end, bare = transport("receiver", layout, memory), Agent(pool)
    parent.send((end.address, bare.metadata, pool.address))
    while not parent.poll():
        end.poll()
        end.wait(0.01)
        bare.notes()
    parent.recv()
    end.close()
    bare.close()


class TransferBench:
    """The process that writes. Owns the other one; close it."""

    def __init__(self, case: Case, tls: str, write_bytes: int) -> None:
        os.environ["UCX_TLS"] = tls
        context = multiprocessing.get_context("spawn")
        self._case = case
        self._layout = layout_of(case)
        self._memory = np.ones(self._layout.total_bytes, dtype=np.uint8)
        self._pages = case.size_bytes // case.page_bytes
        self._each = max(1, write_bytes // case.page_bytes)
        self._random = np.random.default_rng(0)
        self._parent, child = context.Pipe()
        self._process = context.Process(target=receive, args=(child, self._layout, tls), daemon=True)
        self._process.start()
        address, metadata, place = self._parent.recv()
        self._end = transport("sender", self._layout, self._memory)
        self._end.connect("receiver", address)
        self._epoch = 0  # of the receiver
        until(self._end, self._is_up)
        self._bare = Agent(Pool.of(self._memory))
        rows = descriptors(self._layout, grid(self._layout, self._layout))
        self._bare.reach(metadata, Pool(place, self._layout.total_bytes, None), rows, rows)

    def close(self) -> None:
        self._bare.close()
        self._end.close()
        self._parent.send("stop")
        self._process.join(PATIENCE_S)

    def _is_up(self, event: TransportEvent) -> bool:
        if isinstance(event, PeerUp):
            self._epoch = event.epoch
        return isinstance(event, PeerUp)

    def ours_s(self) -> tuple[float, float]:
        """And how much of it this thread was computing."""
        writes = self._writes()
        started, began_cpu = time.perf_counter(), time.thread_time()
        for local, remote in writes:
            self._end.post("receiver", self._epoch, Write(local, remote, b"landed"))
        until(self._end, lambda event: isinstance(event, WriteDone) and event.ok, times=len(writes))
        return time.perf_counter() - started, time.thread_time() - began_cpu

    def bare_s(self) -> float:
        writes = self._writes()
        started = time.perf_counter()
        open_writes = [self._bare.post(local, remote, b"landed") for local, remote in writes]
        for write in open_writes:
            while write is not None and not self._bare.is_done(write):
                pass
        return time.perf_counter() - started

    def _writes(self) -> list[tuple[Indices, Indices]]:
        """Every page once, from and to random places, as of a pool that has been in use."""
        local, remote = (self._random.permutation(self._pages).astype(np.int32) for _ in range(2))
        parts = range(0, self._pages, self._each)
        return [(local[start : start + self._each], remote[start : start + self._each]) for start in parts]


def measure(case: Case, tls: str, write_bytes: int, repeats: int) -> Measured:
    bench = TransferBench(case, tls, write_bytes)
    try:
        found = Measured(case, [], [], [])
        for number in range(repeats + 1):
            (ours_s, cpu_s), bare_s = (bench.ours_s(), bench.bare_s()) if number % 2 else (bench.bare_s(), bench.ours_s())[::-1]
            if number:  # the first of each touches the memory and opens the connection
                found.ours_s.append(ours_s)
                found.cpu_s.append(cpu_s)
                found.bare_s.append(bare_s)
        return found
    finally:
        bench.close()


def print_table(rows: Sequence[Measured]) -> None:
    print(f"{'MiB':>6}{'page KiB':>10}{'ours ms':>11}{'bare ms':>11}{'ours GB/s':>11}{'bare GB/s':>11}{'core':>7}  share")
    for row in rows:
        ours_s, bare_s = statistics.median(row.ours_s), statistics.median(row.bare_s)
        size, page = row.case.size_bytes, row.case.page_bytes
        print(
            f"{size // MIB:>6}{page // 1024:>10}{ours_s * 1e3:>11.2f}{bare_s * 1e3:>11.2f}"
            f"{size / ours_s / 1e9:>11.2f}{size / bare_s / 1e9:>11.2f}{row.cpu:>7.0%}  {row.share}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.transfer", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="MiB of each transfer")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64], help="KiB of one page of one layer's keys")
    parser.add_argument("--write", type=int, default=16, help="MiB of one write at most")
    parser.add_argument("--tls", default="tcp,sm,self", help="UCX_TLS of both processes")
    parser.add_argument("--repeats", type=int, default=9, help="at least, of each case; more of small ones")
    options = parser.parse_args()
    cases = [Case(size * MIB, page * 1024) for page in options.pages for size in options.sizes]
    rows = list[Measured]()
    total = sum(case.size_bytes + 64 * MIB for case in cases)
    done = 0
    with Progress(total, Console(stderr=True)) as progress:
        for case in cases:
            progress.update(done, f"{case.size_bytes // MIB} MiB in pages of {case.page_bytes // 1024} KiB")
            repeats = max(options.repeats, min(SMALL_REPEATS, 256 * MIB // case.size_bytes))
            rows.append(measure(case, options.tls, options.write * MIB, repeats))
            done += case.size_bytes + 64 * MIB
        progress.update(total)
    print_table(rows)
    low = [row for row in rows if row.share.median < TARGET]
    print(f"UCX_TLS={options.tls}; writes of {options.write} MiB at most; target: {TARGET:.0%} of bare NIXL in every row")
    if low:
        sys.exit(f"{len(low)} of {len(rows)} rows are below {TARGET:.0%}")


if __name__ == "__main__":
    main()
