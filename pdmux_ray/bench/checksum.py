"""`python -m pdmux_ray.bench.checksum`: what it costs to check KV that goes from one instance to another (`transfer.checksum`).

Both ends read what is sent once more, page by page. The table has how long one end takes for a GiB in host memory, by the bytes
of one page of one layer's keys, with the pages in any order as of a pool that has been in use. And what a token of a model with
so much KV costs, to be held against what its prefill takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from kv_transfer.nixl_agent import Pool
from kv_transfer.plan import Rows

MIB, GIB = 2**20, 2**30


def rows_of(size_bytes: int, page_bytes: int) -> Rows:
    """Every page of a pool of this size once, in any order: [pages, 2], offset and bytes."""
    order = np.random.default_rng(0).permutation(size_bytes // page_bytes).astype(np.uint64)
    return np.stack([order * np.uint64(page_bytes), np.full_like(order, page_bytes)], axis=1)


def seconds_per_gib(size_bytes: int, page_bytes: int, repeats: int) -> float:
    """The median of so many runs over the whole pool, after one that touches it."""
    memory = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
    pool, rows = Pool.of(memory), rows_of(size_bytes, page_bytes)
    taken_s = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        pool.checksum(rows)
        taken_s.append(time.perf_counter() - began)
    return statistics.median(taken_s[1:]) * GIB / (len(rows) * page_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.checksum", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[2, 6, 16, 32, 64], help="KiB of one page of one layer's keys")
    parser.add_argument("--size", type=int, default=128, help="MiB of the pool")
    parser.add_argument("--token", type=float, default=22.5, help="KiB of KV of a token, of all layers (the demo model's)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'page KiB':>8}{'s/GiB':>9}{'us/token':>10}")
    for page in options.pages:
        per_gib = seconds_per_gib(options.size * MIB, page * 1024, options.repeats)
        print(f"{page:>8}{per_gib:>9.3f}{per_gib * options.token * 1024 / GIB * 1e6:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
