"""How often the 95 % interval of `metrics.goodput` holds the true goodput: simulated servers whose truth is known.

The true goodput is that of the mean shares of good requests over all simulated series of the same length. A server that is
"independent" misses each request by chance; "rows of n" misses as many, but n on end in the mean (a two-state Markov chain);
"queue" has 16 slots, Poisson arrivals and exponential service (mean 1 s), starts empty, and a request is good when it waited at
most half a second.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from pdmux_ray.metrics.goodput import RatePoint, goodput

Server: TypeAlias = Callable[[random.Random, float, int], list[bool]]  # (rng, rate, requests) -> which are good

SHARES: Mapping[float, float] = {1: 0.995, 2: 0.98, 3: 0.95, 4: 0.88, 5: 0.7, 6: 0.4}  # rate -> true share of good requests
SLOTS = 16
QUEUE_RATES = tuple(SLOTS * load for load in (0.7, 0.8, 0.9, 1.0, 1.1))
MAX_WAIT_S = 0.5
ATTAINMENT = 0.9
RESAMPLES = 400


def independent(rng: random.Random, rate: float, requests: int) -> list[bool]:
    return [rng.random() < SHARES[rate] for _ in range(requests)]


def rows(mean_misses: int, rng: random.Random, rate: float, requests: int) -> list[bool]:
    recovers, fails = 1 / mean_misses, (1 - SHARES[rate]) / SHARES[rate] / mean_misses
    good = [rng.random() < SHARES[rate]]
    while len(good) < requests:
        good.append(rng.random() >= fails if good[-1] else rng.random() < recovers)
    return good


def queue(rounds: int, rng: random.Random, rate: float, requests: int) -> list[bool]:
    return [good for _ in range(rounds) for good in _one_round(rng, rate, requests // rounds)]


def _one_round(rng: random.Random, rate: float, requests: int) -> list[bool]:
    free_s, now_s, good = [0.0] * SLOTS, 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(rate)
        begin_s = max(now_s, free_s[0])
        good.append(begin_s - now_s <= MAX_WAIT_S)
        heapq.heapreplace(free_s, begin_s + rng.expovariate(1))
    return good


def coverage(server: Server, rates: Sequence[float], requests: int, series: int, seed: int) -> tuple[float, float]:
    """(share of the intervals that hold the true goodput, their mean width over it)."""
    rng = random.Random(seed)
    measured = [[RatePoint(rate, server(rng, rate, requests)) for rate in rates] for _ in range(series)]
    found = [goodput(points, ATTAINMENT, resamples=RESAMPLES) for points in measured]
    true_rps = _true_goodput(measured)
    held = sum(low <= true_rps <= high for low, high in (each.ci for each in found))
    width = statistics.fmean(each.ci[1] - each.ci[0] for each in found)
    return held / series, width / true_rps


def _true_goodput(measured: Sequence[Sequence[RatePoint]]) -> float:
    together = [
        RatePoint(at_rate[0].rate_rps, [good for point in at_rate for good in point.good])
        for at_rate in zip(*measured, strict=True)
    ]
    return goodput(together, ATTAINMENT, resamples=1).rps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=300, help="simulated series of runs for each row")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    simulated: list[tuple[str, Server, Sequence[float], Sequence[int]]] = [
        ("independent", independent, tuple(SHARES), (100, 300, 1000)),
        ("rows of 5", partial(rows, 5), tuple(SHARES), (100, 300, 1000)),
        ("rows of 20", partial(rows, 20), tuple(SHARES), (100, 300, 1000)),
        ("queue", partial(queue, 1), QUEUE_RATES, (300, 1000, 3000)),
        ("queue, 5 rounds", partial(queue, 5), QUEUE_RATES, (1000, 3000)),
    ]
    print("| misses | requests per rate | intervals that hold the truth | width |\n|---|---|---|---|")
    for name, server, rates, counts in simulated:
        for requests in counts:
            held, width = coverage(server, rates, requests, args.series, args.seed)
            print(f"| {name} | {requests} | {held:.0%} | {width:.0%} |", flush=True)


if __name__ == "__main__":
    main()
