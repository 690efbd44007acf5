"""`pdmux bench URL`: one server at its rates. And what this command shares with `compare`: a job made of the arguments."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import targets
from pdmux_ray.bench.client import Target, body
from pdmux_ray.bench.conduct import Conductor
from pdmux_ray.bench.generator import Options
from pdmux_ray.bench.generator import run as run_loop
from pdmux_ray.bench.offer import Arrivals, Offer, Terms
from pdmux_ray.bench.provenance import provenance
from pdmux_ray.bench.search import Bisection
from pdmux_ray.bench.session import REQUESTS_FILE, UNITS_FILE, Session
from pdmux_ray.bench.slo_text import SloText
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.report import figures, load_report, table
from pdmux_ray.report.progress import Progress
from pdmux_ray.workload.requests import Ask
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

COMPARISON_FILE = "comparison.json"
REPORT_FILE = "report.html"
SAMPLE = 200  # asks whose lengths stand for the workload's


@dataclass(frozen=True, slots=True)
class Job:
    """Load and goal of a command, checked. `terms` lacks the SLO while that is in multiples of an idle server's latency."""

    offer: Offer
    options: Options
    levels: Sequence[float]  # rates or, in closed loop, requests at once
    closed: bool
    search: tuple[float, float, float] | None  # low, high, tolerance
    slo: SloText
    attainment: float
    devices: int
    token_ids: tuple[int, int]
    scaling: Scaling
    endpoint: str
    description: Sequence[str]  # of the workload, as its longest run has it
    sample: Sequence[Ask]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Job:
        """Raises ConfigError for what is wrong or missing; nothing has been sent then."""
        levels = args.rates or args.concurrency or []
        for flag, given in (
            ("--workload", args.workload),
            ("--slo", args.slo),
            ("--rates, --search or --concurrency", levels or args.search),
        ):
            if not given:
                raise ConfigError(
                    f"{flag} is missing. `pdmux bench run --help` explains it; docs/benchmarking.md has examples."
                )
        scaling = Scaling(divide=args.scale_lengths, max_context=args.max_context)
        workload = load_workload(args.workload, scaling=scaling, token_ids=args.token_ids)
        duration_s = None if args.requests else args.duration or 60.0
        if args.concurrency and not args.requests:
            raise ConfigError("--concurrency needs --requests: in a closed loop the server decides how many fit a time.")
        offer = Offer(workload, Arrivals.parse(args.arrivals), args.requests, duration_s, args.warmup, args.seed)
        search = (*args.search, args.tolerance) if args.search else None
        most = max((*levels, *(args.search or ())), key=offer.count)  # what the workload cannot give is told now
        asks = offer.asks(offer.count(most), most, 0) if args.concurrency else [p.ask for p in offer.planned(most, 0)]
        body(Target("", "", args.endpoint), asks[0])  # chat takes no token ids
        description = [*workload.description]
        if isinstance(asks[0].prompt, str):
            description.append(
                "Every run sends these texts again: a server with a prefix cache knows them from the second run on."
            )
        return cls(
            offer,
            Options(drain_s=args.drain),
            levels,
            bool(args.concurrency),
            search,
            SloText.parse(args.slo),
            args.attainment,
            args.devices,
            args.token_ids,
            scaling,
            args.endpoint,
            description,
            asks[:SAMPLE],
        )

    @property
    def most_runs(self) -> int:
        """Of one target and round."""
        return Bisection(*self.search).most_probes if self.search else len(self.levels)

    def conditions(self, target: Target) -> dict[str, str]:
        """What is asked of it, in words: `requests.jsonl` of equal ones can be compared."""
        offer = self.offer
        return {
            "url": target.url,
            "model": target.model,
            "endpoint": target.endpoint,
            "workload": offer.workload.name,
            "load": "closed loop" if self.closed else f"open loop, {offer.arrivals} arrivals",
            "each run": f"{offer.requests} requests" if offer.requests else f"{offer.duration_s:g} s of arrivals",
            "warm-up": f"{offer.warmup} requests",
            "seed": str(offer.seed),
            "scaling": f"lengths divided by {self.scaling.divide:g}, context at most {self.scaling.max_context or 'any'}",
            "token ids": f"{self.token_ids[0]} to {self.token_ids[1]}",
            "drain": f"{self.options.drain_s:g} s",
        }

    def terms(self, target: Target, console: Console) -> tuple[Terms, list[str]]:
        """With the SLO in seconds, measured first if it must be; and notes about it."""
        solo, notes = None, []
        if self.slo.needs_solo:
            console.print(f"measuring {target.url} when idle", soft_wrap=True, markup=False, highlight=False)
            plan = targets.plan_solo(self.sample, self.token_ids, self.scaling.max_context)
            solo = run_loop(targets.measure_solo(target, plan))
            notes.append(f"The SLO is a multiple of what one request takes {solo} (measured at {target.url}).")
            console.print(str(solo), soft_wrap=True, markup=False, highlight=False)
        slo = self.slo.resolve(solo)
        console.print(f"SLO: {figures.slo(slo)}", soft_wrap=True, markup=False, highlight=False)
        return Terms(slo, self.attainment, self.devices), notes


def claim(directory: Path, force: bool) -> None:
    """Makes the directory for results. Raises ConfigError when it has some already (`force` removes them), or when it cannot be
    written."""
    names = (summaries.FILE_NAME, REQUESTS_FILE, UNITS_FILE, REPORT_FILE, COMPARISON_FILE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = [name for name in names if (directory / name).exists()]
        if there and not force:
            raise ConfigError(
                f"{directory} has {', '.join(there)} already. Choose another --out, or replace them with --force."
            )
        for name in there:
            (directory / name).unlink()
        (directory / REQUESTS_FILE).touch()
        (directory / REQUESTS_FILE).unlink()
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be written: {error}") from None


def connect(url: str, args: argparse.Namespace) -> Target:
    """A target that has answered one request. Raises TargetError, ConfigError."""
    base = targets.base_url(url)
    target = Target(base, run_loop(targets.choose_model(base, args.model, args.api_key)), args.endpoint, args.api_key)
    return run_loop(targets.checked(target))


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when a run is invalid or nothing was measured, 130 after Ctrl-C."""
    console, job = Console(stderr=True), Job.of(args)
    name, url = targets.split_name(args.url)
    claim(args.out, args.force)
    with measured() as outcome:
        target = connect(url, args)
        terms, notes = job.terms(target, console)
        session = Session(name, args.out, terms, job.conditions(target))
        session.notes += [*provenance(), *job.description, *notes]
        outcome.sessions.append(session)
        with Progress(job.most_runs, console) as progress:
            conductor = Conductor(job.offer, job.options, progress, job.closed)
            if job.search:
                _search(conductor, session, target, Bisection(*job.search))
            for level in job.levels:
                conductor.run(session, target, level)
    return outcome.finish(args.out)


def _search(conductor: Conductor, session: Session, target: Target, bisection: Bisection) -> None:
    while (rate := bisection.next_rate()) is not None:
        summary = conductor.run(session, target, rate)
        if summary.invalid:
            raise PdmuxError(f"the search stops at {figures.rate(rate)} requests/s: {summary.invalid}")
        bisection.note(rate, summary.good_fraction >= session.terms.attainment)


@dataclass(slots=True)
class Outcome:
    """What a command has measured when it ends, however it ends."""

    sessions: list[Session]
    stopped: str | None = None  # why it ended before its plan did
    interrupted: bool = False

    def finish(self, directory: Path) -> int:
        """Writes the report, prints the figures, returns the exit code."""
        measured = [session for session in self.sessions if session.records]
        if self.stopped:
            say(self.stopped)
        if measured:
            for session in measured:
                if not session.finished:
                    self._mark(session)
                    session.write()
            write_report(directory, measured)
            console = Console()
            table.print_runs(console, [session.summary() for session in measured])
            console.print(f"{directory / REPORT_FILE}", soft_wrap=True, markup=False, highlight=False)
        if self.interrupted:
            return 130
        useless = [session for session in self.sessions if _useless(session)]
        return 1 if self.stopped or useless or not self.sessions else 0

    def _mark(self, session: Session) -> None:
        if self.interrupted:
            session.note("INTERRUPTED before the end of its plan.")
        elif self.stopped:
            session.note(f"STOPPED before the end of its plan: {self.stopped}")


@contextlib.contextmanager
def measured() -> Iterator[Outcome]:
    """Turns what ends a measurement early into an outcome, so that what there is gets written."""
    outcome = Outcome([])
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.interrupted = True
        say("interrupted; writing what there is")
    except ConfigError:
        raise
    except PdmuxError as error:
        outcome.stopped = str(error)
    except OSError as error:
        outcome.stopped = f"the results cannot be written: {error}"


def _useless(session: Session) -> bool:
    """Says so when no request completed at all."""
    complete = any(lifeline.ending is Ending.COMPLETE for record in session.records for lifeline in record.lifelines)
    if not complete:
        errors = [lifeline.error for record in session.records for lifeline in record.lifelines if lifeline.error]
        say(f"{session.name}: no request completed{f'; the first error: {errors[0]}' if errors else ''}")
    return not complete or any(record.invalid for record in session.records)


def write_report(directory: Path, sessions: Sequence[Session]) -> Path:
    """report.html of all sessions."""
    runs = [
        load_report.TargetRuns(
            session.name,
            summary := session.summary(),
            [(run, record.lifelines) for run, record in zip(summary.runs, session.records, strict=True)],
            session.units,
        )
        for session in sessions
    ]
    notes = list(dict.fromkeys(note for session in sessions for note in session.notes))
    workloads = dict.fromkeys(session.conditions.get("workload", "load") for session in sessions)
    title = f"{' and '.join(workloads)} on {' and '.join(session.name for session in sessions)}"
    return load_report.write_report(directory, title, runs, notes)


def say(text: str) -> None:
    print(f"pdmux bench: {figures.printable(text)}", file=sys.stderr, flush=True)
