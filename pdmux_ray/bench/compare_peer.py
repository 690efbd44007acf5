"""Goodput of this project's modes beside another server's, for four kinds of work, on one machine.

    scripts/compare-peer --peer 'COMMAND {model} {port}' [--quick] [--out DIR]

Each command serves the Hugging Face directory {model} on loopback port {port}. The servers run one at a time, since an idle
one would still take CPU, in alternating order from round to round, since a machine's speed drifts. The first of them sets the
measure for all: its latency when idle makes the SLO, and what it can carry makes the rates. A server's rates ascend until one
at which fewer than half of the requests are good.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import server
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.compare import conclude
from pdmux_ray.bench.load.comparison import goodput_ratio
from pdmux_ray.bench.load.conductor import Conductor
from pdmux_ray.bench.load.generator import Options, closed_loop
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.bench.load.job import SAMPLE
from pdmux_ray.bench.load.offer import Offer, Terms
from pdmux_ray.bench.load.outcome import Outcome, claim, measured, say, write_report
from pdmux_ray.bench.load.provenance import provenance
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.load.slo_text import SloText
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line
from pdmux_ray.types import Mode
from pdmux_ray.workload.requests import Workload
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

SERVE = Path(__file__).parents[2] / "scripts" / "serve"
MAX_CONTEXT = 2048
MIN_OUTPUT_TOKENS = 8  # a shorter one has no ITL to speak of
MODES = (Mode.PREFILL_FIRST.value, Mode.CHUNKED.value)
SLO = "ttft=5x,itl=3x"
HOPELESS = 0.5  # of the requests are good: higher rates tell nothing more
START_S = 45.0  # for the forecast: a server's start and end
CALIBRATION_CONCURRENCY = 8

# workload -> what its lengths are divided by, so that two cores and a small model do a request in fractions of a second
SHAPES = {"sharegpt": 4.0, "loogle": 64.0, "openthoughts": 128.0, "tool-agent": 32.0}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    rounds: int
    seconds: float  # of arrivals of each run
    shares: Sequence[float]  # the rates, as shares of what the first server carries in a closed loop
    drain_s: float

    @property
    def run_s(self) -> float:
        """At most, of one run."""
        return self.seconds + self.drain_s / 2 + 2.0


FULL = Extent(2, 10.0, (0.25, 0.45, 0.65, 0.85), 8.0)
QUICK = Extent(1, 5.0, (0.3, 0.7), 5.0)


@dataclass(slots=True)
class Shape:
    """One kind of work and what was measured with it."""

    workload: Workload
    divide: float  # of its lengths
    offer: Offer
    directory: Path
    rates: list[float] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What is to be run: `commands` by name, the first being the baseline."""

    commands: dict[str, str]
    model: Path
    extent: Extent
    shapes: list[Shape]
    seed: int
    console: Console
    terms: Terms | None = None  # one SLO for all: what an idle server needs depends on the prompt, not on the workload

    @property
    def most_s(self) -> float:
        starts = self.extent.rounds * len(self.commands)
        runs = starts * len(self.shapes) * len(self.extent.shares)
        return starts * START_S + runs * self.extent.run_s + 20.0 * len(self.shapes)

    def describe(self) -> None:
        extent = self.extent
        self._print(f"{len(self.commands)} servers, one at a time, {extent.rounds} rounds:")
        for name, command in self.commands.items():
            self._print(f"  {name}: {command}")
        for shape in self.shapes:
            self._print(f"  {shape.workload.name}, lengths divided by {shape.divide:g}")
        self._print(
            f"{len(extent.shares)} rates each, {extent.seconds:g} s of arrivals; SLO {SLO} of {next(iter(self.commands))}; "
            f"at most about {self.most_s / 60:.0f} minutes"
        )

    def carry_out(self, outcome: Outcome) -> None:
        """Raises what ends it early; the sessions have what there is."""
        steps = self.extent.rounds * len(self.commands) * len(self.shapes) * len(self.extent.shares)
        with Progress(steps, self.console) as progress:
            done = 0.0
            for round_index in range(self.extent.rounds):
                for name in list(self.commands)[:: -1 if round_index % 2 else 1]:
                    progress.update(done, f"round {round_index + 1} of {self.extent.rounds}: starting {name}")
                    with self._served(name) as target:
                        for shape in self.shapes:
                            self._offer(shape, name, target, round_index, progress, done, outcome)
                            done += len(self.extent.shares)

    @contextmanager
    def _served(self, name: str) -> Iterator[Target]:
        with server.running(self.commands[name], str(self.model)) as started:
            url = started.url
            model = run_loop(targets.choose_model(url, None, None))
            yield run_loop(targets.checked(Target(url, model)))

    def _offer(
        self, shape: Shape, name: str, target: Target, round_index: int, progress: Progress, done: float, outcome: Outcome
    ) -> None:
        terms = self.terms = self.terms or self._idle_terms(target)
        shape.rates = shape.rates or self._rates(shape, target)
        if name not in shape.sessions:
            session = Session(name, shape.directory / name, terms, self._conditions(shape, target, name))
            session.notes += [*shape.workload.description, *provenance()]
            shape.sessions[name] = session
            outcome.sessions.append(session)
        run_loop(_saturate(target, replace(shape.offer, requests=2, duration_s=None), level=0.5))  # warms up
        conductor = Conductor(shape.offer, Options(drain_s=self.extent.drain_s), progress)
        for index, rate in enumerate(shape.rates):
            conductor.done = done + index
            summary = conductor.run(shape.sessions[name], target, rate, round_index)
            if summary.invalid:  # something else wanted the cores; once more, with other prompts
                conductor.done = done + index
                summary = conductor.run(shape.sessions[name], target, rate, round_index + self.extent.rounds)
            if summary.good_fraction < HOPELESS:
                return

    def _idle_terms(self, target: Target) -> Terms:
        asks = [ask for shape in self.shapes for ask in shape.workload.asks(SAMPLE, self.seed)]
        solo = run_loop(targets.measure_solo(target, targets.plan_solo(asks, TOKEN_IDS, MAX_CONTEXT)))
        terms = Terms(SloText.parse(SLO).resolve(solo))
        self._print(f"{solo}; SLO: {figures.slo(terms.slo)}")
        return terms

    def _rates(self, shape: Shape, target: Target) -> list[float]:
        offer = replace(shape.offer, requests=3 * CALIBRATION_CONCURRENCY, duration_s=None)
        carried_rps = run_loop(_saturate(target, offer, level=1.0))
        rates = [float(f"{carried_rps * share:.2g}") for share in self.extent.shares]
        self._print(
            f"{shape.workload.name}: {carried_rps:.2g} requests/s with {CALIBRATION_CONCURRENCY} at once, so the rates are "
            f"{', '.join(map(figures.rate, rates))}"
        )
        return rates

    def _conditions(self, shape: Shape, target: Target, name: str) -> dict[str, str]:
        return {
            "url": self.commands[name],
            "model": target.model,
            "workload": shape.workload.name,
            "load": f"open loop, {shape.offer.arrivals} arrivals",
            "each run": f"{self.extent.seconds:g} s of arrivals",
            "rounds": str(self.extent.rounds),
            "seed": str(self.seed),
        }

    def _print(self, text: str) -> None:
        print_line(self.console, text)


async def _saturate(target: Target, offer: Offer, level: float) -> float:
    """Requests a second in a closed loop. `level` only makes its prompts others than those of any run."""
    asks = offer.asks(offer.count(level), level, -1)
    load = await closed_loop(target, asks, CALIBRATION_CONCURRENCY, Options(), lambda sent, done, planned: None)
    if load.interrupted:
        raise KeyboardInterrupt
    failed = [lifeline for lifeline in load.lifelines if not lifeline.token_s]
    if failed:
        raise PdmuxError(f"{target.url} failed {len(failed)} of {len(asks)} requests when it was tried: {failed[0].error}")
    end_s = max(lifeline.ended_s for lifeline in load.lifelines)
    return len(asks) / (end_s - load.lifelines[0].due_s)


def conclude_all(directory: Path, shapes: Sequence[Shape], names: Sequence[str]) -> list[str]:
    """Writes a report and comparison for each shape; returns one table of all, in Markdown."""
    lines = ["| workload | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for shape in shapes:
        sessions = [shape.sessions[name] for name in names if name in shape.sessions and shape.sessions[name].records]
        if not sessions:
            continue
        write_report(shape.directory, sessions)
        if len(sessions) > 1:
            conclude(shape.directory, sessions)
        cells = [_cell(session, sessions[0]) for session in sessions] + [figures.NONE] * (len(names) - len(sessions))
        lines.append(f"| {shape.workload.name} | " + " | ".join(cells) + " |")
    (directory / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def _cell(session: Session, first: Session) -> str:
    summary = session.summary()
    low, high = summary.goodput_ci
    cell = f"{figures.goodput(summary)} ({figures.significant(low)} to {figures.significant(high)})"
    return cell if session is first else f"{cell}; {goodput_ratio(session, first)}"


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/compare-peer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--peer", metavar="COMMAND", help="of another server, with {model} and {port}; without it only ours run"
    )
    parser.add_argument(
        "--ours", metavar="COMMAND", default=f"{SERVE} --set model={{model}} --set engine.mode={{mode}} --port {{port}}"
    )
    text = f"of ours, the first being the baseline; default: {','.join(MODES)}"
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M,…", help=text)
    parser.add_argument("--model", default="demo", help="Hugging Face directory that all serve; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("compare-peer"), metavar="DIR", help="default: compare-peer")
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")
    parser.add_argument("--quick", action="store_true", help="a few minutes and wide intervals, to see that it works")
    parser.add_argument("--workloads", default=",".join(SHAPES), metavar="W,W,…", help="default: all four")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_plan(args: argparse.Namespace, console: Console) -> Plan:
    """Raises ConfigError."""
    extent = QUICK if args.quick else FULL
    known = [mode.value for mode in Mode]
    if unknown := [mode for mode in args.modes.split(",") if mode not in known]:
        raise ConfigError(f"there is no mode {unknown[0]!r}. Use {', '.join(known)}.")
    commands = {mode: args.ours.replace("{mode}", mode) for mode in args.modes.split(",")}
    if args.peer:
        commands["peer"] = args.peer
    shapes = []
    for name in args.workloads.split(","):
        scaling = Scaling(
            divide=(divide := SHAPES.get(name, 1.0)), max_context=MAX_CONTEXT, min_output_tokens=MIN_OUTPUT_TOKENS
        )
        workload = load_workload(name, scaling=scaling, token_ids=TOKEN_IDS)
        offer = Offer(workload, duration_s=extent.seconds, seed=args.seed)
        shapes.append(Shape(workload, divide, offer, args.out / name))
    return Plan(commands, resolve(args.model), extent, shapes, args.seed, console)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when something was not measured, 2 for a wrong argument, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        plan = make_plan(args, Console(stderr=True))
        for shape in plan.shapes:
            for directory in (shape.directory, *(shape.directory / name for name in plan.commands)):
                claim(directory, args.force)
    except PdmuxError as error:
        print(f"scripts/compare-peer: {error}", file=sys.stderr)
        return 2
    plan.describe()
    begun_s = time.monotonic()
    with measured() as outcome:
        plan.carry_out(outcome)
    if outcome.stopped:
        say(outcome.stopped)
    lines = conclude_all(args.out, plan.shapes, list(plan.commands))
    print("\nGoodput, requests/s (95 % interval); ratio to the first\n\n" + "\n".join(lines))
    print(f"\n{args.out}, after {(time.monotonic() - begun_s) / 60:.1f} minutes")
    whole = len(outcome.sessions) == len(plan.shapes) * len(plan.commands) and all(s.points() for s in outcome.sessions)
    return 130 if outcome.interrupted else 0 if whole and outcome.stopped is None else 1


if __name__ == "__main__":
    sys.exit(main())
