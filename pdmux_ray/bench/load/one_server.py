"""`pdmux bench URL`: one server at its rates, or a search for the highest one that holds."""

from __future__ import annotations

import argparse

from rich.console import Console

from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.conductor import Conductor
from pdmux_ray.bench.load.job import Job, connect
from pdmux_ray.bench.load.outcome import measured, reserve
from pdmux_ray.bench.load.provenance import provenance
from pdmux_ray.bench.load.search import Bisection
from pdmux_ray.bench.load.session import Session
from pdmux_ray.errors import PdmuxError
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when a run is invalid or nothing was measured, 130 after Ctrl-C."""
    console, job = Console(stderr=True), Job.of(args)
    name, url = targets.split_name(args.url)
    reserve(args.out, args.force)
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
