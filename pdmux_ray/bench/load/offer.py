"""What a run offers to a server: how many requests, which ones and when. The same for every target of a comparison."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.workload.arrivals import POISSON, Arrivals, LazyPlan, plan
from pdmux_ray.workload.requests import Ask, Planned, PlannedRequest, Workload
from pdmux_ray.workload.source import TokenWorkload

MAX_REQUESTS = 100_000  # of one run: they are planned ahead and kept in memory
MAX_DAYS = 7  # of one run


@dataclass(frozen=True, slots=True)
class Offer:
    """Of one benchmark. Exactly one of `requests` and `duration_s` is set: how much each rate gets."""

    workload: Workload
    arrivals: Arrivals = POISSON
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0  # first requests of each run, sent like the others and left out of every figure
    seed: int = 0

    def count(self, rate: float) -> int:
        """Requests of one run that count. Raises ConfigError when they are too many, or take too long."""
        count = self.requests if self.requests is not None else max(1, round(rate * (self.duration_s or 0.0)))
        if count + self.warmup > MAX_REQUESTS:
            raise ConfigError(
                f"{count + self.warmup} requests in one run are too many (at most {MAX_REQUESTS}). Lower --requests, "
                "--duration or --warmup."
            )
        if (count + self.warmup) / rate > MAX_DAYS * 86400:
            raise ConfigError(
                f"{count + self.warmup} requests at {rate:g} requests/s take more than {MAX_DAYS} days. Raise the rate, or "
                "lower --requests, --duration or --warmup."
            )
        return count

    def asks(self, count: int, level: float, round_index: int) -> list[Ask]:
        """Those of one run. `level`: its rate or concurrency."""
        return self.workload.asks(count + self.warmup, self._seed(level, round_index))

    def planned(self, rate: float, round_index: int) -> list[PlannedRequest]:
        """One run in open loop, warm-up included."""
        asks = self.asks(self.count(rate), rate, round_index)
        return plan(asks, self.arrivals.due_s(asks, rate, self._seed(rate, round_index)))

    def coming(self, rate: float, round_index: int) -> Planned:
        """`planned`, for who takes one request after the other and keeps none, so that no prompts are too many."""
        if not isinstance(self.workload, TokenWorkload):
            return self.planned(rate, round_index)
        seed = self._seed(rate, round_index)
        asks = self.workload.lazily(self.count(rate) + self.warmup, seed)
        return LazyPlan(asks, self.arrivals.due_s(asks.outlines, rate, seed))

    def seconds(self, rate: float) -> float:
        """How long the arrivals of one run take."""
        return (self.count(rate) + self.warmup) / rate

    def _seed(self, level: float, round_index: int) -> int:
        """Each run has prompts of its own, so that none finds its prompts in the cache of a server that had an earlier run;
        and the same ones whatever other runs there are, so that runs of different days can be compared."""
        return random.Random(f"{self.seed} {level!r} {round_index}").getrandbits(31)


@dataclass(frozen=True, slots=True)
class Terms:
    """By what the requests are judged."""

    slo: Slo
    attainment: float = 0.9
    devices: int = 1
