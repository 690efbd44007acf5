"""Which way pays on GPUs: the same requests through the same simulated fleet, once for each way of routing them.

The mix: nine of ten requests are chats (ShareGPT's lengths), one has a long document. Objectives: a gap of 20 ms between two
tokens, which PD multiplexing's public code asks of an 8B model, and a first token within 0.5 s and 0.1 ms for each token of the
prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.costs.gpu import H200, LLAMA_8B, Gpu, GpuModel, device_model
from pdmux_ray.metrics.goodput import Goodput, RatePoint, Slo, goodput, resampled
from pdmux_ray.metrics.lifeline import quantile
from pdmux_ray.metrics.summary import RunSummary, Summary, rate_point, summarize, summarize_run
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.workload.arrivals import plan, poisson
from pdmux_ray.workload.lengths import PowerLaw
from pdmux_ray.workload.requests import Workload
from pdmux_ray.workload.shapes import STRATIFIED, Shape

SLO = Slo(ttft_s=0.5, ttft_s_per_token=1e-4, itl_s=0.02)
ATTAINMENT = 0.9
DEVICES = 4
LONG = Shape(
    "documents",
    (
        "Long documents: a power law from 8,192 to 32,768 tokens with mean 16,000, answers of 16 to 512 with mean 128. They "
        "share nothing.",
        STRATIFIED,
    ),
    PowerLaw(8_192, 16_000, 32_768),
    PowerLaw(16, 128, 512),
)


@dataclass(frozen=True, slots=True)
class Way:
    """How a fleet of `DEVICES` instances is cut, and how it routes."""

    name: str
    routing: str
    threshold_tokens: int = 512
    prefill: int = 2

    def config(self, bandwidth: float) -> AppConfig:
        return parse_app_config(
            {
                "topology": {"prefill": self.prefill, "mux": DEVICES - self.prefill},
                "gateway": {
                    "routing": {"policy": self.routing, "threshold_tokens": self.threshold_tokens, "bandwidth": bandwidth}
                },
                "engine": {
                    "device": "fake",
                    "mode": "auto",
                    "prefix_cache": False,  # nothing is shared
                    "max_batch": 256,
                    "max_waiting": 1024,
                    "max_prefill_tokens": 8192,
                    "multiplex": {"ttft_s": SLO.ttft_s, "ttft_s_per_token": SLO.ttft_s_per_token, "itl_s": SLO.itl_s},
                },
            }
        )


PREDICT = "predict"
WAYS = (
    Way(PREDICT, "predict"),
    Way("local", "local"),
    Way("remote", "remote"),
    *(Way(f"threshold-{tokens}", "threshold", tokens) for tokens in (256, 1024, 16_384)),
    Way("no prefill instances", "local", prefill=0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one way, at all rates."""

    way: Way
    summary: Summary
    verdicts: Sequence[RatePoint]
    reasons: Sequence[Mapping[str, int]]  # of the routes, at each rate
    predicted: Sequence[float | None]  # mean TTFT that routes were chosen by, seconds, at each rate

    @property
    def points(self) -> list[tuple[float, float]]:
        """(rate, share of good requests)."""
        return [(run.rate, run.good_fraction) for run in self.summary.runs]

    def at(self, attainment: float) -> Outcome:
        """The same, where so many must be good."""
        return replace(self, summary=summarize(self.summary.runs, self.verdicts, SLO, attainment, self.summary.devices))

    def goodput(self, attainment: float) -> Goodput:
        """Requests a second of the whole fleet."""
        return goodput(self.verdicts, attainment)

    def times_that_of(self, other: Outcome, attainment: float) -> tuple[float, float | None]:
        """95 % interval of this goodput over the other's, by resamples of the same requests. Where the other holds no rate, it
        is thought to hold the lowest, and so there is no upper end."""
        pairs = list(zip(resampled(self.verdicts, attainment), resampled(other.verdicts, attainment), strict=True))
        least = min(point.rate_rps for point in other.verdicts)
        low = quantile(sorted(mine / (its or least) for mine, its in pairs), 0.025)
        high = quantile(sorted(mine / its if its else math.inf for mine, its in pairs), 0.975)
        return low, high if math.isfinite(high) else None


@dataclass(frozen=True, slots=True)
class _One:
    summary: RunSummary
    point: RatePoint
    reasons: Mapping[str, int]
    predicted_s: float | None


def compare(
    ways: Sequence[Way],
    workload: Workload,
    rates: Sequence[float],
    *,
    seconds: float,
    seed: int = 0,
    workers: int = 1,
    gpu: Gpu = H200,
    model: GpuModel = LLAMA_8B,
) -> list[Outcome]:
    """Every way at every rate (requests a second of the whole fleet, ascending). The requests are the same for all ways, about
    `seconds` of arrivals. Raises ConfigError."""
    jobs = [(way, rate) for way in ways for rate in rates]
    run = partial(_run, workload=workload, seconds=seconds, seed=seed, gpu=gpu, model=model)
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            found = list(pool.map(run, jobs))
    else:
        found = list(map(run, jobs))
    outcomes = []
    for index, way in enumerate(ways):
        mine = found[index * len(rates) : (index + 1) * len(rates)]
        summary = summarize([one.summary for one in mine], [one.point for one in mine], SLO, ATTAINMENT, DEVICES)
        verdicts, predicted = [one.point for one in mine], [one.predicted_s for one in mine]
        outcomes.append(Outcome(way, summary, verdicts, [one.reasons for one in mine], predicted))
    return outcomes


def _run(job: tuple[Way, float], workload: Workload, seconds: float, seed: int, gpu: Gpu, model: GpuModel) -> _One:
    way, rate = job
    count = max(1, round(rate * seconds))
    planned = plan(workload.asks(count, seed), poisson(count, rate, seed))
    run = simulate(way.config(gpu.link_bytes_per_s), device_model(gpu, model), planned, seed=seed)
    summary = summarize_run(way.name, rate, run.lifelines, SLO)
    reasons = Counter(choice.reason.value for choice in run.choices)
    return _One(summary, rate_point(rate, run.lifelines, SLO), reasons, _predicted_s(run))


def _predicted_s(run: Run) -> float | None:
    found = [choice.predicted_ttft_s for choice in run.choices if choice.predicted_ttft_s is not None]
    return fmean(found) if found else None
