"""What the weights of `policy.mode_choice` are worth: the share of good requests of `auto` with several of them, and of
`split`, on simulated servers of the demo model.

    python -m pdmux_ray.bench.auto_weights --profile FILE [--late 1,2,4] [--lost 1,2,4] [--requests N] [--slower …] [--out FILE]

The work and its rates are those that docs/performance.md compares servers at: the four shapes of `scripts/compare-peer`, and
the mix of `ablation`. The SLO is the same multiple of what one request takes on an idle server in prefill_first; it is auto's
objective. All servers have the same requests at the same times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from rich.console import Console

from pdmux_ray.bench import settings
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.targets import plan_solo
from pdmux_ray.bench.scaled_work import MAX_CONTEXT, SLO, mixed, scaled
from pdmux_ray.bench.simulate import parse_slower
from pdmux_ray.bench.simulated_runs import Setup, idle_latency, only_errors, simulated
from pdmux_ray.config import parse_app_config
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.profiled import profiled
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.metrics.summary import rate_point
from pdmux_ray.model.source import resolve
from pdmux_ray.policy import mode_choice
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.sim.fleet import LINE_S
from pdmux_ray.workload.requests import Workload

MIX = "mix"
# Requests a second: as servers on two cores were given them, and more of openthoughts, of which a simulated one carries more.
RATES: Mapping[str, Sequence[float]] = {
    "openthoughts": (10.0, 12.0),
    "sharegpt": (2.8, 3.7),
    "tool-agent": (9.4, 12.0),
    "loogle": (4.5, 6.7),
    MIX: (2.6, 3.7),
}
WEIGHTS = (1.0, 2.0, 4.0)
SLOWER = "decode=1.2,prefill=1.3,mixed=1.4"  # a server whose client computes on the same cores
SPREAD = 0.19  # of the same server's steps
REQUESTS = 400
LINK = 1e9  # bytes a second, of which one instance moves none
SAMPLE = 200  # requests whose lengths stand for a workload's


@dataclass(frozen=True, slots=True)
class Weights:
    """Misses that they count for: a late first token, and a lost second."""

    late_token: float
    lost_second: float

    @classmethod
    def now(cls) -> Weights:
        """As policies have them."""
        return cls(mode_choice.MISSES_PER_LATE_TOKEN, mode_choice.MISSES_PER_LOST_SECOND)

    def put(self) -> None:
        """For all of this process."""
        mode_choice.MISSES_PER_LATE_TOKEN, mode_choice.MISSES_PER_LOST_SECOND = self.late_token, self.lost_second

    def __str__(self) -> str:
        return f"auto, late {self.late_token:g}, lost {self.lost_second:g}"


@contextmanager
def weighed(weights: Weights | None) -> Iterator[None]:
    """With these weights in this process; None: as they are."""
    before = Weights.now()
    try:
        (weights or before).put()
        yield
    finally:
        before.put()


@dataclass(frozen=True, slots=True)
class AskedWork:
    """One kind of requests, and what is asked of servers that get them."""

    name: str
    workload: Workload
    slo: Slo


Key: TypeAlias = tuple[str, float, Weights | None]  # of a question


@dataclass(frozen=True, slots=True)
class Question:
    """One run. `weights`: None for a server in split."""

    work: AskedWork
    rate: float
    weights: Weights | None

    @property
    def key(self) -> Key:
        return self.work.name, self.rate, self.weights


def work_of(name: str) -> Workload:
    return mixed() if name == MIX else scaled(name)


def server(mode: str, device: DeviceModel, spread: float, offer: Offer, slo: Slo | None = None) -> Setup:
    """One instance; `slo`: its objectives."""
    objectives = {} if slo is None else settings.limits(slo)
    config = parse_app_config({"engine": {"mode": mode, "max_waiting": 1024, "multiplex": objectives}})
    return Setup(config, device, MAX_CONTEXT, spread, LINE_S, offer, drain_s=60.0, directory=Path())


def asked(name: str, device: DeviceModel, slo: str, seed: int) -> AskedWork:
    """With its SLO in seconds."""
    workload = work_of(name)
    plan = plan_solo(workload.asks(SAMPLE, seed), TOKEN_IDS, MAX_CONTEXT)
    idle = server("prefill_first", device, 0.0, Offer(workload, requests=1))
    return AskedWork(name, workload, SloText.parse(slo).resolve(idle_latency(idle, plan)))


def answer(question: Question, device: DeviceModel, spread: float, requests: int, seed: int) -> float:
    """Share of good requests."""
    work, rate = question.work, question.rate
    offer = Offer(work.workload, requests=requests, seed=seed)
    mode = "split" if question.weights is None else "auto"
    with weighed(question.weights):
        run = simulated(server(mode, device, spread, offer, work.slo), offer.planned(rate, 0))
    return rate_point(rate, run.lifelines, work.slo).good_fraction


def table(works: Sequence[AskedWork], ways: Sequence[Weights | None], shares: Mapping[Key, float]) -> list[str]:
    """In Markdown: a row a way, a column a kind of work and rate; the mean of all last."""
    heads = [f"{work.name} {figures.rate(rate)}/s" for work in works for rate in RATES[work.name]]
    lines = [f"| | {' | '.join(heads)} | mean |", "|" + "---|" * (len(heads) + 2)]
    for way in ways:
        found = [shares[question.key] for question in _row(works, way)]
        name = "split" if way is None else f"{way}{' (now)' if way == Weights.now() else ''}"
        lines.append(f"| {name} | {' | '.join(map(figures.percent, [*found, fmean(found)]))} |")
    return lines


def _row(works: Sequence[AskedWork], way: Weights | None) -> list[Question]:
    return [Question(work, rate, way) for work in works for rate in RATES[work.name]]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pdmux_ray.bench.auto_weights", description=(__doc__ or "").split("\n\n")[0]
    )
    text = "of the demo model, as `pdmux profile configs/cpu-mux.yaml` writes it"
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help=text)
    weights = ",".join(f"{weight:g}" for weight in WEIGHTS)
    for name, what in (("late", "a late first token"), ("lost", "a lost second")):
        parser.add_argument(f"--{name}", default=weights, metavar="W,W,…", help=f"misses for {what}; default {weights}")
    parser.add_argument("--work", default=",".join(RATES), metavar="W,W,…", help=f"default {','.join(RATES)}")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of each run; default {REQUESTS}")
    parser.add_argument("--slower", default=SLOWER, metavar="X", help=f"see `pdmux simulate`; default {SLOWER}")
    parser.add_argument("--spread", type=float, default=SPREAD, metavar="X", help=f"likewise; default {SPREAD:g}")
    parser.add_argument("--slo", default=SLO, metavar="SLO", help=f"default {SLO}: times the idle server's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table, too")
    return parser


def measure(args: argparse.Namespace, console: Console) -> list[str]:
    """Lines. Raises ConfigError."""
    names = args.work.split(",")
    if unknown := set(names) - set(RATES):
        raise ConfigError(f"there is no work {', '.join(sorted(unknown))}; there is {', '.join(RATES)}")
    ways: list[Weights | None] = [Weights(*pair) for pair in product(_numbers(args.late), _numbers(args.lost))]
    ways.append(None)
    found = profiled(args.profile, resolve("demo", weights=False), parse_app_config({}).engine, LINK)
    device = replace(found.device, slower=parse_slower(args.slower))
    works = [asked(name, device, args.slo, args.seed) for name in names]
    questions = [question for way in ways for question in _row(works, way)]
    answers = partial(answer, device=device, spread=args.spread, requests=args.requests, seed=args.seed)
    shares: dict[Key, float] = {}
    with Progress(len(questions), console) as progress, ProcessPoolExecutor(usable_cores()) as pool:
        for question, share in zip(questions, pool.map(answers, questions), strict=True):
            shares[question.key] = share
            progress.update(float(len(shares)), f"{question.work.name} {figures.rate(question.rate)}/s")
    slos = [f"{work.name}: {figures.slo(work.slo)}" for work in works]
    return [*table(works, ways, shares), "", f"{args.requests} requests a run, seed {args.seed}; {device.name}.", *slos]


def _numbers(text: str) -> list[float]:
    """Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < 1e6 for each in found):
        raise ConfigError(f"{text!r} is no list of weights over 0, such as 1,2,4")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    try:
        with only_errors():
            lines = measure(args, console)
    except PdmuxError as error:
        print(f"auto_weights: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
