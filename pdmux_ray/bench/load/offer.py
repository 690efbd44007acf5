"""What a run offers to a server: how many requests, which ones and when. The same for every target of a comparison."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.workload import arrivals
from pdmux_ray.workload.requests import Ask, PlannedRequest, Workload

MAX_REQUESTS = 100_000  # of one run: they are planned ahead and kept in memory


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. `poisson`, `gamma` with a burstiness (1 is Poisson, less comes in bursts), or as in the trace."""

    kind: str = "poisson"
    burstiness: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """`poisson`, `gamma:0.5` or `trace`. Raises ConfigError."""
        kind, colon, shape = text.partition(":")
        if kind in ("poisson", "trace") and not colon:
            return cls(kind)
        try:
            burstiness = float(shape)
        except ValueError:
            burstiness = math.nan
        if kind != "gamma" or not 0 < burstiness < math.inf:
            raise ConfigError(f"--arrivals {text!r} is not understood. Use poisson, trace, or gamma:K with K over 0.")
        return cls(kind, burstiness)

    def __str__(self) -> str:
        return f"gamma:{self.burstiness:g}" if self.kind == "gamma" else self.kind

    def due_s(self, asks: list[Ask], rate_rps: float, seed: int) -> list[float]:
        """Seconds from the run's start, one for each ask. Raises ConfigError when the workload has no times of its own."""
        if self.kind == "poisson":
            return arrivals.poisson(len(asks), rate_rps, seed)
        if self.kind == "gamma":
            return arrivals.gamma(len(asks), rate_rps, self.burstiness, seed)
        times_s = [ask.trace_s for ask in asks if ask.trace_s is not None]
        if len(times_s) < len(asks):
            raise ConfigError("--arrivals trace needs a workload with times of its own: mooncake:FILE or azure:FILE.")
        return arrivals.rescaled(times_s, rate_rps)


@dataclass(frozen=True, slots=True)
class Offer:
    """Of one benchmark. Exactly one of `requests` and `duration_s` is set: how much each rate gets."""

    workload: Workload
    arrivals: Arrivals = Arrivals()
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0  # first requests of each run, sent like the others and left out of every figure
    seed: int = 0

    def count(self, rate: float) -> int:
        """Requests of one run that count. Raises ConfigError when they are too many."""
        count = self.requests if self.requests is not None else max(1, round(rate * (self.duration_s or 0.0)))
        if count + self.warmup > MAX_REQUESTS:
            raise ConfigError(
                f"{count + self.warmup} requests in one run are too many (at most {MAX_REQUESTS}). Lower --requests, "
                "--duration or --warmup."
            )
        return count

    def asks(self, count: int, level: float, round_index: int) -> list[Ask]:
        """Those of one run. `level`: its rate or concurrency."""
        return self.workload.asks(count + self.warmup, self._seed(level, round_index))

    def planned(self, rate: float, round_index: int) -> list[PlannedRequest]:
        """One run in open loop, warm-up included."""
        asks = self.asks(self.count(rate), rate, round_index)
        return arrivals.plan(asks, self.arrivals.due_s(asks, rate, self._seed(rate, round_index)))

    def seconds(self, rate: float) -> float:
        """How long the arrivals of one run take."""
        return (self.count(rate) + self.warmup) / rate

    def _seed(self, level: float, round_index: int) -> int:
        """Each run has prompts of its own, so that none finds its prompts in the cache of a server that had an earlier run;
        and the same ones whatever other runs there are, so that runs of different days can be compared."""
        return random.Random(f"{self.seed} {level!r} {round_index}").getrandbits(31)


@dataclass(frozen=True, slots=True)
class Terms:
    """By what the requests are judged, and for how long they are waited for."""

    slo: Slo
    attainment: float = 0.9
    devices: int = 1
    drain_s: float = 60.0  # after the last arrival; what is not done by then is unfinished, a miss
