"""How fast the simulator is: `python -m pdmux_ray.bench.simulator_speed --trace mooncake:FILE`.

Three tables, or those that are asked for: a trace on the fleet of a configuration, by mode; short requests on one instance,
from a thousand to a million; and a fleet of a thousand instances. Each row is a process of its own, on one core; its memory is
the most that process ever had.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.simulated_runs import only_errors
from pdmux_ray.config import AppConfig, load_serve_config, parse_app_config
from pdmux_ray.costs.catalog import COSTS, device_of
from pdmux_ray.costs.gpu import ASSUMED, SHAPES
from pdmux_ray.errors import PdmuxError
from pdmux_ray.report.progress import Progress
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.workload.arrivals import LazyPlan, poisson
from pdmux_ray.workload.requests import Planned
from pdmux_ray.workload.source import TokenWorkload, load_workload

CONFIG = Path("configs/sim-8x4-h200-llama70b.yaml")
GPU, SHAPE, TP = "H200", "llama-70b", 4
MODES = ("auto", "chunked", "time_shared", "split", "prefill_first")
SHORT = "fixed:64,8"  # prompt and answer
SHORT_RATE = 20.0  # a second and instance
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
FLEET, FLEET_REQUESTS, FLEET_RATE = 1_000, 5_000, 500.0
FLEET_SPEC = "fixed:512,64"
HEADS = (
    *("what", "instances", "requests", "simulated s", "CPU s", "× real time", "ms a request", "events", "µs an event"),
    *("decode steps", "memory MiB"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A row to be measured."""

    name: str
    config: AppConfig
    spec: str  # of the workload
    requests: int | None = None  # None: the trace's
    rate: float | None = None  # of all instances together; None: the trace's own times
    costs: str = "roofline"
    coalesce: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of it, in one process."""

    case: Case
    requests: int
    simulated_s: float  # from the first arrival to the last token
    cpu_s: float  # of the simulation alone
    events: int
    steps: int  # of all engines
    failed: int  # requests
    memory_bytes: int  # most, of the whole process

    @property
    def cells(self) -> list[str]:
        instances = len(self.case.config.roles)
        return [
            *(self.case.name, f"{instances:,}", f"{self.requests:,}", f"{self.simulated_s:,.0f}", f"{self.cpu_s:,.1f}"),
            *(f"{self.simulated_s / self.cpu_s:,.1f}", f"{self.cpu_s / self.requests * 1e3:.2f}", f"{self.events:,}"),
            *(f"{self.cpu_s / self.events * 1e6:.1f}", f"{self.steps:,}", f"{self.memory_bytes / 2**20:,.0f}"),
        ]


def planned(case: Case, seed: int) -> Planned:
    """Raises ConfigError."""
    workload = load_workload(case.spec, token_ids=TOKEN_IDS)
    assert isinstance(workload, TokenWorkload)
    count = case.requests or len(getattr(workload.source, "requests", ()))
    asks = workload.lazily(count, seed)
    if case.rate is None:
        return LazyPlan(asks, [outline.trace_s or 0.0 for outline in asks.outlines])
    return LazyPlan(asks, poisson(count, case.rate, seed))


def measured(case: Case, seed: int) -> Row:
    """In this process. Raises ConfigError."""
    page_size, costs = case.config.engine.page_size, next(costs for costs in COSTS if costs == case.costs)
    device = device_of(GPU, SHAPE, tp=TP, costs=costs, page_size=page_size, assume=ASSUMED)
    requests, context = planned(case, seed), SHAPES[SHAPE].context_length
    began_s = time.process_time()
    with only_errors():
        run = simulate(case.config, device, requests, seed=seed, context_length=context, learning=True, coalesce=case.coalesce)
    cpu_s = time.process_time() - began_s
    return Row(case, len(run.lifelines), _seconds(run), cpu_s, run.events, _steps(run), _failed(run), _memory_bytes())


def _seconds(run: Run) -> float:
    return max(lifeline.ended_s for lifeline in run.lifelines) - run.lifelines[0].due_s


def _steps(run: Run) -> int:
    return sum(engine.counters.steps for engine in run.engines.values())


def _failed(run: Run) -> int:
    return sum(lifeline.error is not None for lifeline in run.lifelines)


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trace_cases(
    config: Path, spec: str, requests: int | None, costs: str, modes: Sequence[str], one_by_one: bool
) -> list[Case]:
    """By mode, the configuration's first. Raises ConfigError."""
    load_workload(spec, token_ids=TOKEN_IDS)  # what is wrong with it is told now
    cases = []
    for mode in modes:
        app = load_serve_config(config, [f"engine.mode={mode}"])[1]
        cases.append(Case(mode, app, spec, requests, None, costs))
        if one_by_one:
            cases.append(Case(f"{mode}, step by step", app, spec, requests, None, costs, coalesce=False))
    return cases


def growth_cases(counts: Sequence[int]) -> list[Case]:
    engine = {"device": "fake", "mode": "chunked", "max_batch": 256, "max_waiting": 4096}
    app = parse_app_config({"engine": engine})
    return [Case(f"{count:,} short ones", app, SHORT, count, SHORT_RATE) for count in counts]


def fleet_cases(instances: int) -> list[Case]:
    engine = {"device": "fake", "mode": "chunked", "max_batch": 256, "max_waiting": 4096, "chunk_tokens": 2048}
    app = parse_app_config({"instances": instances, "engine": engine})
    return [Case(f"{instances:,} instances", app, FLEET_SPEC, FLEET_REQUESTS, FLEET_RATE)]


def rows(cases: Sequence[Case], seed: int, console: Console) -> Iterator[Row]:
    """One after the other, each in a process of its own. Raises ConfigError."""
    with Progress(len(cases), console) as progress:
        for done, case in enumerate(cases):
            progress.update(float(done), case.name)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                yield pool.submit(measured, case, seed).result()
        progress.update(float(len(cases)))


def table(found: Sequence[Row]) -> list[str]:
    """In Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" + "|--:" * (len(HEADS) - 1) + "|"]
    lines += [f"| {' | '.join(row.cells)} |" for row in found]
    return lines + [f"{row.failed:,} requests of {row.case.name} failed." for row in found if row.failed]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pdmux_ray.bench.simulator_speed", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--trace", metavar="SPEC", help="mooncake:FILE or azure:FILE, at its own times")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help=f"of the fleet; default {CONFIG}")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of the trace")
    parser.add_argument("--costs", choices=COSTS, default="silicon", help="of the trace's steps; default silicon")
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M,…", help=f"of the trace; default {','.join(MODES)}")
    parser.add_argument("--one-by-one", action="store_true", help="the trace also with every decode step by itself")
    counts = ",".join(map(str, COUNTS))
    parser.add_argument("--counts", default=counts, metavar="N,N,…", help=f"of short requests; default {counts}")
    parser.add_argument("--instances", type=int, default=FLEET, metavar="N", help=f"of the large fleet; default {FLEET}")
    parser.add_argument("--only", choices=("trace", "growth", "fleet"), help="of the three tables")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def cases_of(args: argparse.Namespace) -> dict[str, list[Case]]:
    """Raises ConfigError, ValueError."""
    makers: dict[str, Callable[[], list[Case]]] = {
        "growth": lambda: growth_cases([int(count) for count in args.counts.split(",")]),
        "fleet": partial(fleet_cases, args.instances),
    }
    if args.trace:
        modes = args.modes.split(",")
        makers["trace"] = lambda: trace_cases(args.config, args.trace, args.requests, args.costs, modes, args.one_by_one)
    return {name: make() for name, make in makers.items() if args.only in (None, name)}


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    try:
        for cases in cases_of(args).values():
            print("\n".join(table([])), flush=True)
            for row in rows(cases, args.seed, console):
                print("\n".join(table([row])[len(table([])) :]), flush=True)
            print()
    except (PdmuxError, ValueError) as error:
        print(f"simulator_speed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
