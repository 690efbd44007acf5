"""Runs that never happened, for reports to be made of."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import rate_point, summarize, summarize_run
from pdmux_ray.report.load_report import TargetRuns, UnitsSample

SLO = Slo(ttft_s=0.5, itl_s=0.05)


def lifeline(due_s: float, ttft_s: float, gaps_s: Sequence[float], prompt_tokens: int = 100) -> Lifeline:
    """A complete one."""
    found = Lifeline(due_s=due_s, sent_s=due_s, prompt_tokens=prompt_tokens)
    found.tokens_arrived(now_s := due_s + ttft_s)
    for gap_s in gaps_s:
        found.tokens_arrived(now_s := now_s + gap_s)
    found.complete(now_s, "length")
    return found


def failed(due_s: float, error: str) -> Lifeline:
    found = Lifeline(due_s=due_s, sent_s=due_s, prompt_tokens=100)
    found.fail(due_s + 0.01, error)
    return found


def lifelines(rate: float, seed: int, count: int = 60, tokens: int = 20, error: str = "503 overloaded") -> list[Lifeline]:
    """Slower as the rate grows; the tenth request fails, the twentieth is truncated."""
    rng = random.Random(seed)
    found = [
        lifeline(
            index / rate,
            rng.uniform(0.5, 1.5) * 0.06 * rate,
            [rng.uniform(0.8, 1.2) * (0.02 + 0.003 * rate) for _ in range(tokens - 1)],
            rng.randrange(20, 2000),
        )
        for index in range(count)
    ]
    found[9] = failed(found[9].due_s, error)
    found[19].ending = Ending.TRUNCATED
    return found


def target(
    name: str,
    rates: Sequence[float] = (2, 4, 8),
    *,
    invalid: Sequence[float] = (),
    why: str = "the client sent late",
    units: bool = False,
    slo: Slo = SLO,
    **more: object,
) -> TargetRuns:
    """One run a rate, each from second 0 on. `more`: of `lifelines`."""
    runs = []
    for index, rate in enumerate(rates):
        requests = lifelines(rate, seed=index, **more)  # type: ignore[arg-type]
        runs.append((summarize_run(name, rate, requests, slo, why if rate in invalid else None), requests))
    points = [rate_point(run.rate, requests, slo) for run, requests in runs if run.invalid is None]
    summary = summarize([run for run, _ in runs], points, slo, attainment=0.9)
    samples = [
        UnitsSample(0.5 * step, 16 * ((step + run) % 4), 132 - 16 * ((step + run) % 4), run)
        for run in range(len(rates))
        for step in range(20)
    ]
    return TargetRuns(name, summary, runs, samples if units else ())
