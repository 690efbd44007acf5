"""The fleets that publications describe, and the highest rate that they carry.

All fleets are simulated as servers run. No constant of their step times is taken from what is compared here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmux_ray.bench.load.search import Bisection
from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.costs import gpu as roofline
from pdmux_ray.costs import silicon
from pdmux_ray.costs.catalog import Costs
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.gpu import ASSUMED, Gpu, GpuModel
from pdmux_ray.costs.sm_share import Assumptions
from pdmux_ray.metrics.goodput import Bound, Goodput, Slo, goodput
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.metrics.summary import rate_point
from pdmux_ray.report import figures
from pdmux_ray.sim.fleet import simulate
from pdmux_ray.workload.arrivals import plan, poisson
from pdmux_ray.workload.requests import Ask

SEED = 0
ATTAINMENT = 0.9
CONTEXT = 131_072  # tokens that every model takes: of some it is more than they were made for, their step times do not care
TOKEN_IDS = (0, 50_000)

Tell = Callable[[str], None]
"""Called with what was found, now and then."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where they are from, and what is assumed of parts of a GPU."""

    costs: Costs = "silicon"
    assume: Assumptions = ASSUMED

    def device(self, gpu: Gpu, model: GpuModel, page_size: int = 16, *, tp: int = 1) -> DeviceModel:
        """Of an instance. Raises ConfigError."""
        make = silicon.device_model if self.costs == "silicon" else roofline.device_model
        return make(gpu, model, page_size, tp=tp, assume=self.assume)

    def __str__(self) -> str:
        measured = "Step times are sums of measured operations (aiconfigurator 0.12, vLLM)."
        return measured if self.costs == "silicon" else "Step times are a roofline's (costs/gpu.py)."


@dataclass(frozen=True, slots=True)
class Fleet:
    """One system of a comparison."""

    name: str
    config: AppConfig
    device: DeviceModel
    gpus: int  # of all instances together


@dataclass(frozen=True, slots=True)
class Load:
    """What it is offered."""

    asks: Sequence[Ask]
    rates: tuple[float, float]  # requests a second between which its limit is looked for
    drain_s: float = math.inf  # after the last arrival: who is not done then, is none of the good ones
    tolerance: float = 0.08  # between the last rate that held and the first that did not


def config(engine: Mapping[str, Any], **more: Any) -> AppConfig:
    """With patience for everything: a publication's clients wait. `more`: of the application."""
    waits = {"max_waiting": 100_000, "transfer": {"fetch_s": 36_000.0}}
    gateway = {"request_timeout_s": 36_000.0, **more.pop("gateway", {})}
    return parse_app_config({"engine": {"device": "fake", **waits, **engine}, "gateway": gateway, **more})


def offered(fleet: Fleet, load: Load, rate: float) -> list[Lifeline]:
    """What becomes of the load at so many requests a second, the same ones whatever the fleet."""
    planned = plan(load.asks, poisson(len(load.asks), rate, SEED))
    run = simulate(fleet.config, fleet.device, planned, seed=SEED, context_length=CONTEXT, learning=True, drain_s=load.drain_s)
    return list(run.lifelines)


def limit(fleet: Fleet, load: Load, slos: Sequence[Slo], tell: Tell) -> Goodput:
    """The highest rate up to which each objective is kept by `ATTAINMENT` of the requests: DistServe's rule, which tests TTFT
    and TPOT apart. One objective of both is this project's goodput. Requests a second of the whole fleet."""
    search, judged = Bisection(*load.rates, load.tolerance), []
    while (rate := search.next_rate()) is not None:
        lifelines = offered(fleet, load, rate)
        points = [rate_point(rate, lifelines, slo) for slo in slos]
        judged.append(points)
        least = min(point.good_fraction for point in points)
        search.note(rate, least >= ATTAINMENT)
        tell(f"{fleet.name} at {figures.rate(rate)} requests/s: {figures.percent(least)} good")
    found = [goodput(points, ATTAINMENT) for points in zip(*judged, strict=True)]
    return min(found, key=lambda each: each.rps)


def words(found: Goodput, share: int = 1) -> str:
    """A limit of one of `share` GPUs, with its interval; or which side of the search it lies on."""
    low, high = (each / share for each in found.ci)
    bounds = {Bound.AT_LEAST: "at least ", Bound.BELOW: "below the lowest rate: "}
    return f"{bounds.get(found.bound, '')}{figures.significant(found.rps / share)} ({low:.2g} to {high:.2g})"
