"""`python -m pdmux_ray.bench.metrics_cost`: what metrics cost an instance, at 256 requests a step.

A step's share is held against what the engine itself takes for a step, the device left out, in its cheapest mode: on a device a
step takes tens of times as long. Steps with and without run by turns, the same requests in both; times are of the CPU. A scrape
is collected in another thread of the process, which shares the interpreter with everything else there.

Exits with 1 when both together take more than 1 % of a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from pdmux_ray.bench.control_plane import Feed
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.timeline import StepTimes
from pdmux_ray.metrics.catalog import Component
from pdmux_ray.metrics.exporter import load_figures, registry_of, step_histograms
from pdmux_ray.types import Mode

BATCH, MODE = 256, Mode.PREFILL_FIRST
SCRAPE_PERIOD_S = 5.0
MOST = 0.01
_WARM_UP = 300
_OBSERVATIONS = 100_000
_SCRAPES = 50


class _Unmeasured(StepTimes):
    """An engine without the metric."""

    def note(self, kind: str, took_s: float, predicted_s: float | None) -> None: ...


def observation_s() -> float:
    """Seconds of the CPU that one step's observations take."""
    times = StepTimes()
    begin_s = time.thread_time()
    for number in range(_OBSERVATIONS):
        times.note("decode", 0.02 + number * 1e-8, 0.02)
    return (time.thread_time() - begin_s) / _OBSERVATIONS


def by_turns(steps: int) -> tuple[list[float], list[float], Engine]:
    """Seconds of each step of an engine with, and of one without; and the one with."""
    with_, without = Feed(MODE, BATCH), Feed(MODE, BATCH)
    without.engine.timeline.times = _Unmeasured()
    for _ in range(_WARM_UP):
        with_.step_s()
        without.step_s()
    measured = list[float]()
    bare = list[float]()
    for number in range(steps):
        for feed, times in ((with_, measured), (without, bare)) if number % 2 else ((without, bare), (with_, measured)):
            times.append(feed.step_s())
    without.engine.close()
    return measured, bare, with_.engine


def instance_registry(engine: Engine) -> Collector:
    """As an instance has it."""
    return registry_of(
        Component.INSTANCE,
        lambda: {**load_figures(engine.load()), **engine.figures()},
        step_histograms(engine.timeline.times),
    )


def scrape_s(registry: Collector) -> float:
    """Seconds of the CPU that one takes."""
    begin_s = time.thread_time()
    for _ in range(_SCRAPES):
        generate_latest(registry)
    return (time.thread_time() - begin_s) / _SCRAPES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps with, and as many without")
    steps = parser.parse_args().steps
    measured, bare, engine = by_turns(steps)
    observed_s, step_s = observation_s(), median(bare)
    scraped_s = scrape_s(instance_registry(engine))
    engine.close()
    more_s = median([mine - other for mine, other in zip(measured, bare, strict=True)])
    shares = max(more_s, observed_s) / step_s, scraped_s / SCRAPE_PERIOD_S
    print(f"an engine's own part of a step, batch {BATCH}, mode {MODE.value}: {step_s * 1e6:.1f} us (median of {steps})")
    print(f"  more with metrics, of pairs of steps:          {more_s * 1e6:.2f} us, {more_s / step_s:.2%} of it")
    print(f"  what a step notes, alone:                      {observed_s * 1e6:.2f} us, {observed_s / step_s:.2%} of it")
    print(f"a scrape: {scraped_s * 1e3:.2f} ms; one every {SCRAPE_PERIOD_S:g} s: {shares[1]:.3%} of a core")
    return int(sum(shares) > MOST)


if __name__ == "__main__":
    sys.exit(main())
