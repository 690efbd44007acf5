"""`pdmux tune`: which topology, TP, mode and route gives the most goodput per GPU to a load, and how sure that is.

It leaves a page (`report.html`), the same as data (`tune.json`), a Serve config of the best candidate that servers can run
(`serve.yaml`), and what to expect of it (`expected.json`, and dashboards with it as thresholds). docs/tune.md explains them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import tune_report
from pdmux_ray.bench.load.provenance import command_here
from pdmux_ray.bench.simulate import WHAT
from pdmux_ray.bench.tune_plan import Plan
from pdmux_ray.bench.tune_runs import workers
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards import command as dashboards
from pdmux_ray.metrics.dashboards import expected as expectations
from pdmux_ray.metrics.summary import write_whole
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line, print_rows
from pdmux_ray.tune.candidates import configured
from pdmux_ray.tune.search import Outcome, Search
from pdmux_ray.tune.served import expected, not_yet, serve_config
from pdmux_ray.tune.standing import Standing, conclusion

FILES = ("report.html", "tune.json", "serve.yaml", "expected.json")


def tune(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when no candidate holds any rate. Raises ConfigError."""
    console, plan = Console(stderr=True), Plan.of(args)
    _reserve(args.out, args.force)
    for line in plan.notes:
        print_line(console, line)
    count = args.workers or usable_cores()
    with workers(plan.setting, plan.fresh, count) as submit, Progress(1.0, console) as progress:
        shown = _Shown(progress)
        search = Search(plan.space, plan.works, submit, args.attainment, count, shown.tell, plan.variants)
        outcome = search.run()
    _tell(Console(), outcome)
    _leave(args, plan, outcome)
    print_line(Console(), str(args.out / FILES[0]))
    return 0 if outcome.confirmed[0].held else 1


def _reserve(directory: Path, force: bool) -> None:
    """Raises ConfigError."""
    there = [name for name in FILES if (directory / name).exists()]
    if there and not force:
        raise ConfigError(f"{directory} has {', '.join(there)} already. Choose another --out, or replace them with --force.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in there:
            (directory / name).unlink()
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be written: {error}") from None


@dataclass(slots=True)
class _Shown:
    """The share of runs that are done, which never falls."""

    progress: Progress
    share: float = 0.0

    def tell(self, done: int, left: float, words: str) -> None:
        self.share = max(self.share, done / (done + left))
        self.progress.update(self.share, f"{done} runs, {words}")


def _tell(console: Console, outcome: Outcome) -> None:
    winner = outcome.confirmed[0]
    print_rows(console, tune_report.COLUMNS, tune_report.rows(outcome.confirmed), tune_report.LEFT)
    if outcome.sensitivities:
        cells = tune_report.sensitivity_rows(outcome.sensitivities, winner)
        print_rows(console, tune_report.SENSITIVITY_COLUMNS, cells, range(len(tune_report.SENSITIVITY_COLUMNS)))
        print_line(console, tune_report.sensitivity_line(outcome.sensitivities, winner))
    for line in conclusion(outcome.confirmed):
        print_line(console, line)


def _leave(args: argparse.Namespace, plan: Plan, outcome: Outcome) -> None:
    """Its files. Raises OSError."""
    load, notes = plan.setting.workload.name, [command_here(), WHAT, *plan.notes]
    title = f"{load} on {args.gpus} × {args.gpu or 'a profiled device'}, {args.model}"
    write_whole(args.out / FILES[0], tune_report.page(title, outcome, notes, f"SLO: {figures.slo(plan.setting.slo)}"))
    data = tune_report.document(outcome, {"load": load, "slo": args.slo, "gpus": str(args.gpus), "model": args.model}, notes)
    write_whole(args.out / FILES[1], json.dumps(data, indent=1, allow_nan=False) + "\n")
    served = next((each for each in (*outcome.confirmed, *outcome.standings) if _can_be_served(each)), None)
    if served is not None:
        _leave_config(args.out, plan, served, f"chosen for {load} on {args.gpus} × {args.gpu or 'a profiled device'}")
    if served is None or served.candidate != outcome.confirmed[0].candidate:
        words = "there is no serve.yaml" if served is None else f"serve.yaml is of the best with TP 1, {served.candidate}"
        print_line(Console(stderr=True), f"Servers have no tensor parallelism yet, so {words}.")


def _leave_config(directory: Path, plan: Plan, served: Standing, why: str) -> None:
    settings = configured(plan.setting.base, served.candidate, plan.setting.device(1, ()).link_bytes_per_s)
    comments = [f"{served.candidate}, {why} by `pdmux tune` (docs/tune.md).", command_here()]
    write_whole(directory / FILES[2], serve_config(served.candidate, settings, comments))
    if caveat := not_yet(served.candidate, settings):
        print_line(Console(stderr=True), f"serve.yaml: {caveat}")
    hopes = expected(served, plan.setting.slo)
    write_whole(directory / FILES[3], expectations.text(hopes))
    dashboards.write(directory / "dashboards", hopes)


def _can_be_served(standing: Standing) -> bool:
    return standing.candidate.topology.tp == 1 and standing.held is not None
