"""Trials without a simulation: each candidate carries as much as somebody says."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from pdmux_ray.metrics.goodput import RatePoint, Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import RunSummary, summarize_run
from pdmux_ray.tune.binding import Binds, Uses
from pdmux_ray.tune.candidates import Candidate
from pdmux_ray.tune.grid import clearly
from pdmux_ray.tune.search import Done, Job
from pdmux_ray.tune.trial import LEVEL, Changes, Found

EASY = 0.8


@dataclass(slots=True)
class FakeTrials:
    """`capacity`: requests a second of a candidate, at which just the attainment is good. Each request is good by chance, with
    the same draw for all candidates at a rate; up to `EASY` of the capacity all are, at twice the capacity none."""

    capacity: Callable[[Candidate, Changes], float]
    attainment: float = 0.9
    requests: int = 1000
    jobs: list[Job] = field(default_factory=list)  # that were run, in order

    def submit(self, job: Job) -> Done:
        self.jobs.append(job)
        return Done(self.judge(job))

    def judge(self, job: Job) -> Found:
        load = job.rate / self.capacity(job.candidate, job.changes)
        lost = (1 - self.attainment) * max(load - EASY, 0) / (1 - EASY)
        chance = self.attainment * (2 - load) if load > 1 else 1 - lost
        rng = Random(f"{job.rate} {job.fresh}")
        good = [rng.random() < chance for _ in range(self.requests)]
        clear = clearly(sum(good), len(good), self.attainment, LEVEL) is not None
        causes = {Binds.PREFILL: good.count(False)} if not all(good) else {}
        return Found(RatePoint(job.rate, good), _summary(job), causes, Uses(0.9, 0.5, 0.3, 0.1), load > 1, clear)


def _summary(job: Job) -> RunSummary:
    tokens = array("d", (0.1, 0.12))
    lifeline = Lifeline(0.0, 0.0, tokens, tokens[-1], Ending.COMPLETE, "length", None, 100, 2)
    return summarize_run(str(job.candidate), job.rate, [lifeline], Slo())
