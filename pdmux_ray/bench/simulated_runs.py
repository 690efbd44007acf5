"""The runs of `pdmux simulate`: one for each rate, as many at once as there are cores."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.outcome import TIMELINE_FILE
from pdmux_ray.bench.load.session import from_first_arrival
from pdmux_ray.bench.load.targets import SoloPlan, solo_latency
from pdmux_ray.bench.timeline import Fetched, run_samples
from pdmux_ray.config import AppConfig
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.timeline import KEPT
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.slo_text import SoloLatency
from pdmux_ray.metrics.trace import Source, Trace, chrome_trace
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.series import UnitsSample, Window
from pdmux_ray.serve.descendants import end_with_parent
from pdmux_ray.sim.backlog import falls_behind
from pdmux_ray.sim.fleet import Run, Watch
from pdmux_ray.sim.fleet import simulate as simulate_fleet
from pdmux_ray.workload.requests import Ask, Planned, PlannedRequest

LOOK_EVERY_S = 0.25  # at how far the other processes are

_ended: MutableSequence[int]  # in a process of the pool: requests that have ended, of each run


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a run is made of but its rate."""

    config: AppConfig
    device: DeviceModel
    context_length: int  # of the model
    spread: float  # of step times, see `sim.device.CostDevice`
    line_s: float  # of a message between gateway and instance
    offer: Offer
    drain_s: float  # see `sim.fleet.simulate`
    directory: Path  # for timelines


@dataclass(frozen=True, slots=True)
class Simulated:
    """One run: the requests that count, in the order of their arrival, from the first of them."""

    rate: float
    lifelines: Sequence[Lifeline]
    units: Sequence[UnitsSample]
    behind: str | None  # see `sim.backlog`


@contextmanager
def only_errors() -> Iterator[None]:
    """Are logged: what simulated instances warn of concerns nobody's server."""
    logger = logging.getLogger("pdmux_ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def simulated(setup: Setup, planned: Planned, watch: Watch | None = None, draw: int = 0) -> Run:
    """As servers do, instances learn from their steps. `draw`: of their step times, the nth. Raises ConfigError for settings
    that no engine takes."""
    return simulate_fleet(
        setup.config,
        setup.device,
        planned,
        seed=setup.offer.seed + draw,
        spread=setup.spread,
        line_s=setup.line_s,
        context_length=setup.context_length,
        learning=True,
        drain_s=setup.drain_s,
        watch=watch,
    )


def idle_latency(setup: Setup, plan: SoloPlan) -> SoloLatency:
    """Of one request at a time. Raises ConfigError when there is no answer."""

    def alone(prompt: tuple[int, ...] | str) -> Lifeline:
        return simulated(setup, [PlannedRequest(0, 0.0, Ask(prompt, plan.output_tokens))]).lifelines[0]

    done = [[alone(prompt) for prompt in prompts] for prompts in plan.prompts]
    answered = [life for alike in done for life in alike if life.ending is Ending.COMPLETE]
    solo = solo_latency(done) if len(answered) == sum(map(len, done)) else None
    if solo is None:
        why = next((life.error for alike in done for life in alike if life.error), "answers of one token have no ITL.")
        raise ConfigError(f"an idle fleet gives no latency that --slo could be a multiple of: {why}")
    return solo


def one_run(setup: Setup, rate: float, watch: Watch) -> Simulated:
    """Writes its timeline, too. Raises OSError when it cannot."""
    run = simulated(setup, setup.offer.coming(rate, 0), watch)
    counted = run.lifelines[setup.offer.warmup :]
    window = Window.of(counted)
    trace = _trace(setup.device, run, window)
    path = setup.directory / TIMELINE_FILE.format(figures.rate(rate))
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    units = run_samples(Fetched(trace, 0.0), window.begin_s, window.end_s, 0)
    lifelines = from_first_arrival(counted)
    return Simulated(rate, lifelines, units, falls_behind(lifelines))


def _trace(device: DeviceModel, run: Run, window: Window) -> Trace:
    """The newest records of each instance: as many as a server keeps."""
    sources = [Source(name, device.units, engine.timeline.since(0, most=KEPT)) for name, engine in run.engines.items()]
    return chrome_trace(sources, window.end_s)


def runs(setup: Setup, rates: Sequence[float], progress: Progress, cores: int) -> Iterator[Simulated]:
    """In the order of `rates`; `progress` counts requests. Raises ConfigError, OSError."""
    if min(len(rates), cores) > 1:
        yield from _on_cores(setup, rates, progress, min(len(rates), cores))
        return
    done = 0
    for rate in rates:
        yield one_run(setup, rate, _shown(progress, done, rate))
        done += setup.offer.count(rate)
        progress.update(float(done))


def _shown(progress: Progress, before: int, rate: float) -> Watch:
    return lambda ended: progress.update(float(before + ended), f"{figures.rate(rate)} requests/s")


@contextmanager
def simulating(workers: int, begin: Callable[..., None], *about: object) -> Iterator[ProcessPoolExecutor]:
    """Processes that each `begin(*about)`, and leave Ctrl-C to their parent: it ends them with the block, at once when that
    raises. They end with it, too, however it ends."""
    pool = ProcessPoolExecutor(workers, initializer=_begin, initargs=(begin, about))
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def _begin(begin: Callable[..., None], about: Sequence[object]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin(*about)


def _on_cores(setup: Setup, rates: Sequence[float], progress: Progress, workers: int) -> Iterator[Simulated]:
    """The highest rates, which take longest, begin first."""
    ended = multiprocessing.Array("q", len(rates), lock=False)
    with simulating(workers, _count_in, ended) as pool:
        first = sorted(range(len(rates)), key=lambda index: -setup.offer.count(rates[index]))
        going = {index: pool.submit(_one_of, index, setup, rates[index]) for index in first}
        for index in range(len(rates)):
            yield _awaited(going[index], lambda: progress.update(float(sum(ended)), f"{len(rates)} rates"))
        progress.update(float(sum(map(setup.offer.count, rates))))


def _awaited(going: Future[Simulated], look: Callable[[], None]) -> Simulated:
    while not wait([going], LOOK_EVERY_S).done:
        look()
    return going.result()


def _count_in(ended: MutableSequence[int]) -> None:
    """In a process of the pool."""
    global _ended
    _ended = ended


def _one_of(index: int, setup: Setup, rate: float) -> Simulated:
    def watch(count: int) -> None:
        _ended[index] = count

    return one_run(setup, rate, watch)
