"""`pdmux bench compare` and `pdmux bench report`: several targets under the same load, or what earlier runs left.

rates ──► for each rate, for each round: A, B, …, and the other way round in every second round (a drift of the machine
          meets all targets alike); all targets get the same prompts at the same times
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.comparison import differences, goodput_ratio
from pdmux_ray.bench.load.conductor import Conductor
from pdmux_ray.bench.load.job import Job, connect
from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.outcome import COMPARISON_FILE, Outcome, measured, reserve, say, write_report
from pdmux_ray.bench.load.provenance import provenance
from pdmux_ray.bench.load.session import Session
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.slo_text import SloText
from pdmux_ray.report import figures, table
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.ratios import compare as compare_figures


def compare(args: argparse.Namespace) -> int:
    """Returns the exit code, as `pdmux bench URL` does."""
    named = [targets.split_name(text) for text in args.targets]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("two targets have the same name. Give names: compare a=TARGET b=TARGET.")
    if len(named) < 2:
        raise ConfigError("a comparison needs two targets. One alone is `pdmux bench URL`.")
    urls = {name: place for name, place in named if targets.is_url(place)}
    finished = {name: Session.read(name, Path(place)) for name, place in named if name not in urls}
    places = [args.out, *(args.out / name for name in urls)]
    if taken := {place.resolve() for place in places} & {session.directory.resolve() for session in finished.values()}:
        raise ConfigError(f"{taken.pop()} is to be compared, and --out would replace it. Choose another --out.")
    job = _job(args, bool(urls))
    reserve(args.out, args.force)
    for name in urls:
        reserve(args.out / name, args.force)
    with measured() as outcome:
        if job:
            _measure(job, args, urls, outcome)
        terms = outcome.sessions[0].terms if outcome.sessions else _terms(args, list(finished.values()))
        for session in finished.values():
            rejudge(session, terms)
        by_name = {session.name: session for session in [*outcome.sessions, *finished.values()]}
        outcome.sessions[:] = [by_name[name] for name, _ in named if name in by_name]
    code = outcome.finish(args.out)
    if (whole := [session for session in outcome.sessions if session.records]) and len(whole) > 1:
        conclude(args.out, whole)
    return code


def _job(args: argparse.Namespace, live: bool) -> Job | None:
    if not live:
        return None
    if args.search:
        raise ConfigError("--search belongs to one server: rates that differ cannot be compared. Give --rates.")
    return Job.of(args)


def _terms(args: argparse.Namespace, finished: Sequence[Session]) -> Terms:
    """By which finished runs are judged: --slo, else the first one's."""
    terms = finished[0].terms
    if args.slo is None:
        return terms
    return Terms(SloText.parse(args.slo).resolve(None), args.attainment, args.devices)


def _measure(job: Job, args: argparse.Namespace, urls: dict[str, str], outcome: Outcome) -> None:
    console = Console(stderr=True)
    live: list[tuple[Session, Target]] = []
    terms, notes = None, list[str]()
    for name, url in urls.items():
        target = connect(url, args)
        if terms is None:
            terms, notes = job.terms(target, console)
        session = Session(name, args.out / name, terms, job.conditions(target) | {"rounds": str(args.rounds)})
        session.notes += [*provenance(), *job.description, *notes]
        live.append((session, target))
        outcome.sessions.append(session)
    with Progress(len(job.levels) * args.rounds * len(live), console) as progress:
        conductor = Conductor(job.offer, job.options, progress, job.closed)
        for level in job.levels:
            for round_index in range(args.rounds):
                for session, target in live if round_index % 2 == 0 else reversed(live):
                    conductor.run(session, target, level, round_index)


def rejudge(session: Session, terms: Terms) -> None:
    """Judges a finished one from its raw samples by the terms of the others. Its number of devices is its own."""
    if (session.terms.slo, session.terms.attainment) != (terms.slo, terms.attainment):
        session.note(
            f"{session.name} was measured for {figures.slo(session.terms.slo)} ({figures.percent(session.terms.attainment)}); "
            f"its raw samples are judged here by {figures.slo(terms.slo)} ({figures.percent(terms.attainment)})."
        )
    session.terms = Terms(terms.slo, terms.attainment, session.terms.devices)


def conclude(directory: Path, sessions: Sequence[Session]) -> None:
    """Prints the ratios and writes comparison.json; the first session is the baseline. Raises ConfigError."""
    first, *others = sessions
    console = Console()
    named = [(session.name, session.summary()) for session in sessions]
    table.print_comparison(console, named)
    goodputs = [goodput_ratio(session, first) for session in others]
    for over_first in goodputs:
        table.print_line(console, f"goodput of {over_first.target} over {first.name}: {over_first}")
    warnings = [
        f"{session.name} and {first.name} were not asked the same, so their figures do not compare: {'; '.join(found)}"
        for session in others
        if (found := differences(session.conditions, first.conditions))
    ]
    for warning in warnings:
        say(f"WARNING: {warning}")
    document = {
        "baseline": first.name,
        "directories": {session.name: _place(session.directory, directory) for session in sessions},
        "slo": asdict(first.terms.slo),
        "attainment": first.terms.attainment,
        "goodput": [asdict(found) for found in goodputs],
        "figures": [asdict(found) | {"verdict": found.verdict.value} for found in compare_figures(named)],
        "warnings": warnings,
    }
    path = directory / COMPARISON_FILE
    try:
        summaries.write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _place(directory: Path, of_comparison: Path) -> str:
    """Relative where it lies inside, so that the whole can be moved."""
    whole, inside = of_comparison.resolve(), directory.resolve()
    return str(inside.relative_to(whole) if inside.is_relative_to(whole) else inside)


def report(directory: Path) -> int:
    """Builds report.html again, of one target or of a comparison."""
    if not (directory / COMPARISON_FILE).exists():
        sessions = [Session.read(_name_in(directory), directory)]
    else:
        sessions = _compared(directory)
    try:
        path = write_report(directory, sessions)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from None
    table.print_runs(Console(), [session.summary() for session in sessions])
    if len(sessions) > 1:
        conclude(directory, sessions)
    print(path)
    return 0


def _name_in(directory: Path) -> str:
    runs = summaries.read(directory).runs
    return runs[0].target if runs else directory.resolve().name


def _compared(directory: Path) -> list[Session]:
    """The sessions of a comparison, judged by its terms. Raises ConfigError."""
    path = directory / COMPARISON_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        sessions = [Session.read(name, directory / place) for name, place in document["directories"].items()]
        terms = Terms(Slo(**document["slo"]), float(document["attainment"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a comparison of this version: {error!r}. Compare again.") from None
    for session in sessions:
        rejudge(session, terms)
    return sessions
