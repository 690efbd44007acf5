"""How near `pdmux simulate` comes to servers: the runs that `scripts/compare-peer` has measured, simulated again.

    scripts/compare-peer --profile FILE --targets auto,split,chunked-64 --workloads sharegpt,loogle --shares 0.6,1 --out DIR
    python -m pdmux_ray.bench.simulator_accuracy DIR… --profile FILE [--slower X | --learned FILE] [--out FILE]

Each run is simulated by the same profile, with the same requests at the same times, from several moments of what was learned;
runs of a server at a rate count as one, and a simulated figure is the median of those of the moments, told with their range.
`--slower` and `--learned` are those of `pdmux simulate`; a timeline to learn from should be that of other runs, of which
compare-peer leaves the last one's (DIR/SHAPE/TARGET/timeline.json). Exit status 1 when a figure is further off than its limit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

from rich.console import Console

from pdmux_ray.bench import settings
from pdmux_ray.bench.cli import add_server
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.scaled_work import MAX_CONTEXT, SHAPES, scaled
from pdmux_ray.bench.simulate import as_served
from pdmux_ray.bench.simulated_runs import Setup, only_errors, simulated
from pdmux_ray.config import AppConfig, load_serve_config
from pdmux_ray.costs.profiled import Profiled, profiled
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress

LIMITS = {"TTFT mean": 0.15, "TTFT p99": 0.15, "ITL mean": 0.10, "ITL p99": 0.10, "good requests/s": 0.10}
DRAWS = 8  # moments
DRAIN_S = 60.0
LINK = 1e9  # bytes a second, of which one instance moves none

Case: TypeAlias = tuple[str, str, float]  # shape, target, rate
Figures: TypeAlias = Mapping[str, float]  # by the words of LIMITS; seconds, or requests a second
Answer: TypeAlias = Sequence[Sequence[Lifeline]]  # to a run: from each moment


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What a server was asked, and what came of it."""

    shape: str
    target: str
    config: AppConfig
    offer: Offer
    rate: float
    round_index: int  # the nth at its rate
    slo: Slo
    lifelines: Sequence[Lifeline]

    @property
    def case(self) -> Case:
        return self.shape, self.target, self.rate


@dataclass(frozen=True, slots=True)
class Row:
    """Measured and simulated, of all runs of a target at a rate."""

    case: Case
    measured: Figures
    draws: Sequence[Figures]  # simulated
    single: Sequence[Row]  # of each run by itself

    def simulated(self, word: str) -> float:
        return median(draw[word] for draw in self.draws)

    def off(self, word: str) -> float:
        """Of what was measured."""
        return self.simulated(word) / self.measured[word] - 1 if self.measured[word] else math.inf

    def apart(self, word: str) -> float:
        """How far the errors of single runs are: what of them is the machine's, which was not the same twice."""
        offs = [row.off(word) for row in self.single]
        return max(offs) - min(offs) if all(map(math.isfinite, offs)) else math.nan

    @property
    def missed(self) -> list[str]:
        return [word for word, limit in LIMITS.items() if not abs(self.off(word)) <= limit]


def served_runs(directory: Path) -> Iterator[ServedRun]:
    """All valid ones below it. Raises ConfigError for results of anything but a comparison of our modes."""
    for path in sorted(directory.rglob(summaries.FILE_NAME)):
        target, shape = path.parent.name, path.parent.parent.name
        if target == settings.PEER:
            continue
        if target not in settings.NAMES or shape not in SHAPES:
            raise ConfigError(f"{path.parent} is no SHAPE/TARGET as `scripts/compare-peer` leaves them.")
        yield from _of_session(shape, target, Session.read(target, path.parent))


def _of_session(shape: str, target: str, session: Session) -> Iterator[ServedRun]:
    slo, seed = session.terms.slo, int(session.conditions["seed"])
    config = config_of(target, slo)
    seen = Counter[float]()
    for record in session.records:
        earlier = seen[record.rate]
        seen[record.rate] += 1
        offer = Offer(scaled(shape), requests=len(record.lifelines), seed=seed)
        planned = offer.planned(record.rate, earlier)
        if [len(one.ask.prompt) for one in planned] != [one.prompt_tokens for one in record.lifelines]:
            raise ConfigError(f"{session.directory}: its requests are not those that {shape} has today. Measure it again.")
        if record.invalid is None:
            yield ServedRun(shape, target, config, offer, record.rate, earlier, slo, record.lifelines)


def config_of(target: str, slo: Slo) -> AppConfig:
    """What `settings.command` starts it with, but for the profile."""
    own = {**settings.ONE_PASS, **settings.BY_PROFILE, **settings.BY_RULE}[target]
    objectives = settings.objectives(slo) if target in settings.BY_PROFILE else []
    return load_serve_config(settings.CONFIG, [f"engine.{setting}" for setting in (*own, *objectives)])[1]


def answer(run: ServedRun, found: Profiled, line_s: float, draws: int = 1) -> Answer:
    """The same run, simulated so many times."""
    setup = Setup(run.config, found.device, MAX_CONTEXT, found.spread, line_s, run.offer, DRAIN_S, Path())
    planned = run.offer.planned(run.rate, run.round_index)
    with only_errors():
        return [simulated(setup, planned, draw=draw).lifelines for draw in range(draws)]


def rows(runs: Sequence[ServedRun], answers: Sequence[Answer]) -> list[Row]:
    """One for each target at each rate, in the order of `runs`."""
    cases: dict[Case, list[tuple[ServedRun, Answer]]] = {}
    for run, found in zip(runs, answers, strict=True):
        cases.setdefault(run.case, []).append((run, found))
    return [_row(alike, [_row([each], ()) for each in alike]) for alike in cases.values()]


def _row(alike: Sequence[tuple[ServedRun, Answer]], single: Sequence[Row]) -> Row:
    judged = partial(_judged, alike[0][0])
    measured = [life for run, _ in alike for life in run.lifelines]
    draws = [[life for lifelines in draw for life in lifelines] for draw in zip(*(found for _, found in alike), strict=True)]
    return Row(alike[0][0].case, judged(measured), list(map(judged, draws)), single)


def _judged(like: ServedRun, lifelines: Sequence[Lifeline]) -> Figures:
    (_, target, rate), slo = like.case, like.slo
    run = summaries.summarize_run(target, rate, lifelines, slo)
    values = (run.ttft_s.mean, run.ttft_s.p99, run.itl_s.mean, run.itl_s.p99, run.good_fraction * rate)
    return {word: math.nan if value is None else value for word, value in zip(LIMITS, values, strict=True)}


def table(found: Sequence[Row]) -> list[str]:
    """In Markdown: measured, simulated (from least to most) and how far its median is off; last the median of what it is off,
    how many are within, and how far the errors of single runs of a case are apart."""
    heads = " | ".join(f"{word} (limit {limit:.0%})" for word, limit in LIMITS.items())
    lines = [f"| workload | target | rate/s | {heads} |", "|" + "---|" * (len(LIMITS) + 3)]
    for row in found:
        shape, target, rate = row.case
        lines.append(f"| {shape} | {target} | {figures.rate(rate)} | {' | '.join(_cell(row, word) for word in LIMITS)} |")
    off = {word: sorted(abs(row.off(word)) for row in found) for word in LIMITS}
    within = [
        f"{median(off[word]):.1%}; {sum(one <= limit for one in off[word])} of {len(found)}" for word, limit in LIMITS.items()
    ]
    lines.append(f"| **median; within** | | | {' | '.join(within)} |")
    apart = [[row.apart(word) for row in found if len(row.single) > 1 and math.isfinite(row.apart(word))] for word in LIMITS]
    if all(apart):
        lines.append(f"| single runs of a case apart, median | | | {' | '.join(f'{median(one):.1%}' for one in apart)} |")
    return lines


def _cell(row: Row, word: str) -> str:
    show = figures.significant if word == "good requests/s" else figures.ms
    mark = "" if word not in row.missed else " (!)"
    drawn = [draw[word] for draw in row.draws]
    range_ = f" ({show(min(drawn))} to {show(max(drawn))})" if len(drawn) > 1 else ""
    return f"{show(row.measured[word])} → {show(row.simulated(word))}{range_}, {row.off(word):+.0%}{mark}"


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pdmux_ray.bench.simulator_accuracy", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="that scripts/compare-peer has left")
    text = "that the servers had, or that was measured on the same machine"
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help=text)
    add_server(parser)
    text = f"how often each run is simulated, each time from another moment of what was learned; default {DRAWS}"
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table, too")
    return parser


def measure(args: argparse.Namespace, console: Console) -> tuple[list[str], bool]:
    """Lines, and whether all is within its limit. Raises ConfigError."""
    runs = [run for directory in args.directories for run in served_runs(directory)]
    if not runs:
        raise ConfigError(f"no run was found in {', '.join(map(str, args.directories))}")
    found = profiled(args.profile, resolve("demo", weights=False), runs[0].config.engine, LINK)
    found = as_served(found, args.slower, args.learned, args.spread)
    alike = partial(answer, found=found, line_s=args.line, draws=max(args.draws, 1))
    answers = []
    with ProcessPoolExecutor(usable_cores()) as pool, Progress(len(runs), console) as progress:
        for run, one in zip(runs, pool.map(alike, runs), strict=True):
            answers.append(one)
            progress.update(float(len(answers)), f"{run.shape} {run.target} {figures.rate(run.rate)}/s")
    compared = rows(runs, answers)
    told = f"{len(runs)} runs of servers. Steps take longer than predicted: {found.device.slower}."
    return [*table(compared), "", told], not any(row.missed for row in compared)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a figure is further off than its limit, 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    try:
        lines, holds = measure(args, console)
    except PdmuxError as error:
        print(f"simulator_accuracy: {figures.printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
