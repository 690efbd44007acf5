"""The fleet that `bench.placement` places, and the load that turns: four instances with the time of a GPU each.

Phase by phase, requests come at random (Poisson) and share nothing. In the first phase prompts are long and answers short, and
three instances have enough to prefill; in the second it is the other way round, and three have enough to decode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.costs.gpu import GPUS, SHAPES, device_model
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.sim.fleet import simulate
from pdmux_ray.sim.placement import Look
from pdmux_ray.types import Role
from pdmux_ray.workload.arrivals import plan, poisson
from pdmux_ray.workload.requests import Ask, PlannedRequest

GPU, SHAPE = "A100", "codellama-34b"  # so slow that two cores can stream what four of them generate
PAGE = 128  # tokens: a transfer of small pages would take more of this machine than all else
INSTANCES = 4
MAX_BATCH = 16
DEVICE = device_model(GPUS[GPU], SHAPES[SHAPE], PAGE)
SLO = Slo(ttft_s=2.0, ttft_s_per_token=5e-4, itl_s=0.2)
JITTER = 0.2  # of a length, to both sides


@dataclass(frozen=True, slots=True)
class Phase:
    """Lengths are means, in tokens."""

    name: str
    rate_rps: float
    prompt_tokens: int
    output_tokens: int


LONG_IN = Phase("long prompts, short answers", 4.0, 2000, 20)
LONG_OUT = Phase("short prompts, long answers", 2.9, 100, 300)


@dataclass(frozen=True, slots=True)
class Setting:
    """Of the fleet at the start. What `placed` is false of keeps its ratio."""

    name: str
    prefill: int
    role: Role = Role.DECODE  # of the others
    placed: bool = False

    def args(self, prometheus: str | None = None) -> dict[str, Any]:
        """Of the application."""
        return {
            "served_model_name": "demo",
            "topology": {"prefill": self.prefill, self.role.value: INSTANCES - self.prefill},
            "cpus_per_instance": 0,
            "engine": {
                "device": "fake",
                "fake": {"gpu": GPU, "shape": SHAPE, "pages": DEVICE.layout.pages},
                "page_size": PAGE,
                "mode": "auto",
                "max_batch": MAX_BATCH,
                "max_waiting": 512,
                "prefix_cache": False,  # nothing is shared
                "multiplex": {"ttft_s": SLO.ttft_s, "ttft_s_per_token": SLO.ttft_s_per_token, "itl_s": 0.1},
            },
            "gateway": {"discovery_period_s": 1.0, "routing": {"policy": "remote"}},
            "placement": {
                "enabled": self.placed,
                "prometheus": None if prometheus is None else {"url": prometheus},
            },
        }

    def config(self) -> AppConfig:
        return parse_app_config(self.args())


STATIC = tuple(Setting(f"{prefill} prefill, {INSTANCES - prefill} decode", prefill) for prefill in (3, 2, 1))
PLACED = Setting("placed", 3, placed=True)
ALL_MUX = Setting("4 that do both", 0, Role.MUX)


def planned(phases: Sequence[tuple[Phase, float]], seed: int) -> list[PlannedRequest]:
    """Of phases one after the other, each for so many seconds."""
    rng, asks, due_s, begin_s = random.Random(f"placement {seed}"), [], [], 0.0
    for number, (phase, seconds) in enumerate(phases):
        count = max(round(phase.rate_rps * seconds), 1)
        due_s += [begin_s + at for at in poisson(count, count / seconds, seed + number)]
        asks += [_ask(phase, rng) for _ in range(count)]
        begin_s += seconds
    return plan(asks, due_s)


def _ask(phase: Phase, rng: random.Random) -> Ask:
    means = (phase.prompt_tokens, phase.output_tokens)
    prompt, output = (max(1, round(mean * rng.uniform(1 - JITTER, 1 + JITTER))) for mean in means)
    return Ask(tuple(rng.choices(range(*TOKEN_IDS), k=prompt)), output)


@dataclass(frozen=True, slots=True)
class Sample:
    """The instances by role, at a time of the run."""

    time_s: float
    prefill: int
    others: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one setting under one load. Times from the first arrival's plan."""

    setting: Setting
    lifelines: Sequence[Lifeline]
    begin_s: float  # of the run, on the lifelines' clock
    roles: Sequence[Sample]
    reasons: Sequence[tuple[float, str]] = ()  # of the controller's looks, where they are known

    @property
    def verdicts(self) -> list[Verdict]:
        return [SLO.verdict(lifeline) for lifeline in self.lifelines]

    @property
    def good(self) -> int:
        return self.verdicts.count(Verdict.GOOD)

    @property
    def failed(self) -> int:
        """Requests that got an error, or less than they asked for. Who was not done at the end is only late."""
        return sum(lifeline.ending in (Ending.ERROR, Ending.TRUNCATED) for lifeline in self.lifelines)

    def flips(self, after_s: float = 0.0) -> list[float]:
        """When the ratio changed, from `after_s` on."""
        return [now.time_s for before, now in pairwise(self.roles) if now.prefill != before.prefill and now.time_s >= after_s]


def simulated(setting: Setting, requests: Sequence[PlannedRequest], seed: int, drain_s: float) -> Outcome:
    """The requests through that fleet on a virtual clock. Who is not done `drain_s` after the last arrival is late."""
    run = simulate(setting.config(), DEVICE, requests, seed=seed, context_length=8192, drain_s=drain_s)
    begin_s = run.lifelines[0].due_s - requests[0].due_s
    roles = [_sample(look, begin_s) for look in run.looks]
    reasons = [(look.time_s - begin_s, look.plan.reason.value) for look in run.looks]
    return Outcome(setting, run.lifelines, begin_s, roles, reasons)


def _sample(look: Look, begin_s: float) -> Sample:
    prefill = sum(each.role is Role.PREFILL for each in look.seen)
    return Sample(look.time_s - begin_s, prefill, len(look.seen) - prefill)
