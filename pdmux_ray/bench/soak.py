"""Soaks a server: thousands of mixed requests at saturation, every one answered or cleanly refused.

    python -m pdmux_ray.bench.soak [--server 'COMMAND {model} {port}'] [--model demo] [--requests 2000] [--concurrency 48]

Streams and whole answers of many lengths, clients that leave before or amid the answer, bad input of every kind. At the end it
prints outcomes beside expectations, the page accounting, and the servers' memory over the run. Exit status 1: something is off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdmux_ray.bench import server
from pdmux_ray.bench.soak_requests import KINDS, Kind, pick

MEMORY_SAMPLES = 8
MEMORY_GROWTH = 0.05  # of the servers' memory between the end of the warm-up (a quarter of the run) and the end
SETTLE_S = 10.0
# Gauges of /metrics (pdmux_ray.metrics.catalog).
BUSY = ("pdmux_instance_running_requests", "pdmux_instance_waiting_requests", "pdmux_open_requests")
FREE_PAGES, PAGES = "pdmux_instance_free_pages", "pdmux_instance_pages"


@dataclass(slots=True)
class Report:
    """What a soak has seen."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, outcome) -> requests
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, kind: Kind, outcome: str) -> None:
        self.outcomes[kind.name, outcome] += 1
        if outcome not in kind.expected:
            self.wrong.append(f"{kind.name}: {outcome}")


async def soak(started: server.Server, model: str, requests: int, concurrency: int, seed: int) -> Report:
    """Keeps `concurrency` requests in flight until `requests` have ended."""
    report, begun = Report(), time.monotonic()
    jobs = iter(range(requests))
    timeout = aiohttp.ClientTimeout(total=600)
    # A connection each: on a kept one, a request may cross the server's closing of it, which says nothing about the server.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def worker() -> None:
            for job in jobs:
                rng = random.Random(seed * 1_000_003 + job)
                kind = pick(rng)
                report.add(kind, await _outcome(kind, session, started.url, model, rng))
                if job % max(1, requests // MEMORY_SAMPLES) == 0:
                    report.memory_mib.append(_memory_mib(started))
                    _progress(job, requests, begun)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    report.memory_mib.append(_memory_mib(started))
    report.seconds = time.monotonic() - begun
    return report


async def _outcome(kind: Kind, session: aiohttp.ClientSession, url: str, model: str, rng: random.Random) -> str:
    """ "complete", "left", an HTTP status, or what went wrong; a refusal by a full queue is tried again a few times."""
    for _ in range(20):
        try:
            outcome = await kind.run(session, url, model, rng)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        if outcome != "429":
            return outcome
        await asyncio.sleep(rng.uniform(0.2, 1.0))
    return "429"


def _memory_mib(started: server.Server) -> float:
    """Memory that belongs to the server's processes alone (USS), summed."""
    total = 0
    for process in started.processes():
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total / 2**20


def _progress(done: int, total: int, begun: float) -> None:
    elapsed = time.monotonic() - begun
    eta = elapsed / max(done, 1) * (total - done)
    print(f"\r{done}/{total} requests, {elapsed:.0f} s, about {eta:.0f} s left ", end="", file=sys.stderr, flush=True)


async def pages(url: str) -> dict[str, float]:
    """The engine's own accounting from /metrics, summed over instances."""
    wanted = (*BUSY, FREE_PAGES, PAGES)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    totals: dict[str, float] = {}
    for sample in (s for family in families for s in family.samples if s.name in wanted):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


async def settled_pages(url: str) -> dict[str, float]:
    """`pages` once the gauges have come to rest, or what they are after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = await pages(url)
        if not leaks(now) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.5)


def leaks(now: dict[str, float]) -> list[str]:
    """What an idle server still holds; empty when the accounting is exact."""
    found = [f"{name} = {now.get(name)}" for name in BUSY if now.get(name) != 0]
    if now.get(FREE_PAGES) != now.get(PAGES) or not now.get(PAGES):
        found.append(f"{now.get(FREE_PAGES)} of {now.get(PAGES)} pages are free")
    return found


def print_report(report: Report, now: dict[str, float]) -> bool:
    """Prints the tables; true when all is well."""
    print(f"\n{'kind':28}{'outcome':22}{'requests':>9}")
    for (kind, outcome), count in sorted(report.outcomes.items()):
        print(f"{kind:28}{outcome[:60]:22}{count:9}{'' if outcome in KINDS[kind].expected else '   WRONG'}")
    total = sum(report.outcomes.values())
    print(f"{total} requests in {report.seconds:.0f} s, {len(report.wrong)} with an outcome that was not expected")
    base, end = report.memory_mib[len(report.memory_mib) // 4], report.memory_mib[-1]
    growth = end / base - 1
    print(
        "memory MiB over the run: " + " ".join(f"{m:.0f}" for m in report.memory_mib) + f"  ({growth:+.1%} after the warm-up)"
    )
    left = leaks(now)
    print("pages: " + ("; ".join(left) if left else f"all {now[PAGES]:.0f} free, nobody running or waiting"))
    return not report.wrong and not left and growth <= MEMORY_GROWTH


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="scripts/serve --set model={model} --port {port}")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with server.running(args.server, args.model) as started:
        name = asyncio.run(server.model_name(started.url))
        report = asyncio.run(soak(started, name, args.requests, args.concurrency, args.seed))
        now = asyncio.run(settled_pages(started.url))
    return 0 if print_report(report, now) else 1


if __name__ == "__main__":
    sys.exit(main())
