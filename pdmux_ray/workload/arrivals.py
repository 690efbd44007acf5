"""When requests come. Every process returns seconds from the run's start, ascending, over a span of exactly count / rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.outline import Outline
from pdmux_ray.workload.prompts import LazyAsks
from pdmux_ray.workload.requests import Ask, PlannedRequest

_STREAM = 1  # of random numbers; the lengths of a shape have another one, so that the same seed does not tie them together
BURSTINESS = (0.01, 10_000.0)  # outside of it a gamma draw is all zeros or all ones in double precision


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

    def due_s(self, asks: Sequence[Ask | Outline], rate_rps: float, seed: int) -> list[float]:
        """Seconds from the run's start, one for each ask, or outline of one. Raises ConfigError when the workload has no times
        of its own."""
        if self.kind == "poisson":
            return poisson(len(asks), rate_rps, seed)
        if self.kind == "gamma":
            return gamma(len(asks), rate_rps, self.burstiness, seed)
        times_s = [ask.trace_s for ask in asks if ask.trace_s is not None]
        if len(times_s) < len(asks):
            raise ConfigError("--arrivals trace needs a workload with times of its own: mooncake:FILE or azure:FILE.")
        return rescaled(times_s, rate_rps)


POISSON = Arrivals()


def poisson(count: int, rate_rps: float, seed: int) -> list[float]:
    """A Poisson process, given that exactly `count` requests come in count / rate seconds. Its times are those of as many
    independent uniform draws in order, so the offered rate of a short run has no luck in it. Raises ConfigError."""
    return gamma(count, rate_rps, 1.0, seed)


def gamma(count: int, rate_rps: float, burstiness: float, seed: int) -> list[float]:
    """Gaps drawn from a gamma distribution of shape `burstiness`: 1 is Poisson, less is burstier, more is more regular
    (the coefficient of variation of a gap is 1 / sqrt(burstiness)). Scaled as in `poisson`. Raises ConfigError."""
    span_s = _span_s(count, rate_rps)
    if not BURSTINESS[0] <= burstiness <= BURSTINESS[1]:
        raise ConfigError(f"Burstiness must be {BURSTINESS[0]:g} to {BURSTINESS[1]:g} (1 is Poisson), not {burstiness:g}.")
    if seed < 0:
        raise ConfigError(f"A seed is 0 or more, not {seed}.")
    # One gap more than requests: what follows the last request is part of the span, as what precedes the first one is.
    times = np.cumsum(np.random.default_rng((_STREAM, seed)).gamma(burstiness, size=count + 1))
    return [float(time) for time in times[:-1] * (span_s / times[-1])]


def rescaled(trace_s: Sequence[float], rate_rps: float) -> list[float]:
    """The arrivals of a trace (ascending), stretched or squeezed so that the last of n comes n / rate seconds after the
    first. Bursts stay bursts: requests that came at once in the trace come at once. Raises ConfigError."""
    span_s = _span_s(len(trace_s), rate_rps)
    if any(after < before for before, after in pairwise(trace_s)):
        raise ConfigError("The trace's times must ascend.")
    if len(trace_s) == 1:
        return [0.0]
    length_s = trace_s[-1] - trace_s[0]
    if length_s == 0:
        raise ConfigError(f"All {len(trace_s)} requests of the trace come at the same time: take more, or Poisson arrivals.")
    return [(time - trace_s[0]) * (span_s / length_s) for time in trace_s]


def plan(asks: Sequence[Ask], due_s: Sequence[float]) -> list[PlannedRequest]:
    """Ask i comes at due_s[i]. As many times as asks, ascending; else ConfigError."""
    if len(asks) != len(due_s):
        raise ConfigError(f"{len(asks)} requests cannot come at {len(due_s)} times.")
    if any(after < before for before, after in pairwise(due_s)):
        raise ConfigError("Planned times must ascend.")
    return [PlannedRequest(index, due, ask) for index, (due, ask) in enumerate(zip(due_s, asks, strict=True))]


@dataclass(frozen=True, slots=True)
class LazyPlan:
    """What `plan` makes, a request at a time: of hours of long prompts only those are in memory that somebody holds."""

    asks: LazyAsks
    due_s: Sequence[float]  # ascending, aligned

    def __len__(self) -> int:
        return len(self.due_s)

    def __getitem__(self, index: int, /) -> PlannedRequest:
        place = range(len(self))[index]
        return PlannedRequest(place, self.due_s[place], self.asks[place])

    def __iter__(self) -> Iterator[PlannedRequest]:
        return map(self.__getitem__, range(len(self)))


def _span_s(count: int, rate_rps: float) -> float:
    if count < 1:
        raise ConfigError(f"A run needs at least one request, not {count}.")
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise ConfigError(f"The rate must be a number of requests a second above 0, not {rate_rps}.")
    return count / rate_rps
