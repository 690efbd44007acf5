"""`pdmux tune`: which topology, TP, mode and route gives the most goodput per GPU to a load, and how sure that is.

It leaves a page (`report.html`), the same as data (`tune.json`), a Serve config of the best candidate that servers can run
(`serve.yaml`), and what to expect of it (`expected.json`, and dashboards with it as thresholds); where that is not the best of
all, the best one's config, too (`winner.yaml`). docs/tune.md explains them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import tune_report
from pdmux_ray.bench.load.provenance import command_here
from pdmux_ray.bench.simulate import WHAT
from pdmux_ray.bench.tune_plan import Plan
from pdmux_ray.bench.tune_runs import workers
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.dashboards import command as dashboards
from pdmux_ray.metrics.dashboards import expected as expectations
from pdmux_ray.metrics.summary import write_whole
from pdmux_ray.report import figures
from pdmux_ray.report.progress import Progress
from pdmux_ray.report.table import print_line, print_rows
from pdmux_ray.tune.candidates import configured
from pdmux_ray.tune.search import Outcome, Search
from pdmux_ray.tune.served import expected, serve_config
from pdmux_ray.tune.standing import Standing, conclusion, ratio, winner_of

FILES = ("report.html", "tune.json", "serve.yaml", "expected.json", "winner.yaml")


def tune(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when no candidate holds any rate. Raises ConfigError."""
    console, plan = Console(stderr=True), Plan.of(args)
    _reserve(args.out, args.force)
    for line in plan.notes:
        print_line(console, line)
    can_serve = plan.servers.can_run
    with workers(plan.setting, plan.fresh, plan.workers) as submit, Progress(1.0, console) as progress:
        shown = _Shown(progress)
        search = Search(plan.space, plan.works, submit, args.attainment, plan.workers, shown.tell, plan.variants, can_serve)
        outcome = search.run()
    runnable = [each for each in outcome.confirmed if each.held and can_serve(each.candidate)]
    served = winner_of(runnable) if runnable else None
    winner = outcome.winner
    lines = [*conclusion(outcome.confirmed), *_of_servers(plan, winner, served)]
    _tell(Console(), outcome, lines)
    _leave(args, plan, outcome, lines)
    _leave_configs(args, plan, winner, served)
    print_line(Console(), str(args.out / FILES[0]))
    return 0 if winner.held else 1


def _of_servers(plan: Plan, winner: Standing, served: Standing | None) -> list[str]:
    """Where they cannot run the winner: why, and what they can."""
    lack = plan.servers.lack(winner.candidate)
    if winner.held is None or lack is None:
        return []
    if served is None:
        return [f"No server of this release runs that, or any that holds a rate: {lack} There is no serve.yaml."]
    return [
        f"No server of this release runs that: {lack} serve.yaml is of the best that they run, {served.candidate}: "
        f"{figures.significant(served.goodput.rps)} requests/s per GPU, {ratio(served, winner)}; winner.yaml is of the winner."
    ]


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


def _tell(console: Console, outcome: Outcome, lines: Sequence[str]) -> None:
    winner = outcome.winner
    print_rows(console, tune_report.COLUMNS, tune_report.rows(outcome.confirmed), tune_report.LEFT)
    if outcome.sensitivities:
        cells = tune_report.sensitivity_rows(outcome.sensitivities, winner)
        print_rows(console, tune_report.SENSITIVITY_COLUMNS, cells, range(len(tune_report.SENSITIVITY_COLUMNS)))
        print_line(console, tune_report.sensitivity_line(outcome.sensitivities, winner))
    for line in lines:
        print_line(console, line)


def _leave(args: argparse.Namespace, plan: Plan, outcome: Outcome, lines: Sequence[str]) -> None:
    """Its page and data. Raises OSError."""
    load, notes = plan.setting.workload.name, [command_here(), WHAT, *plan.notes]
    title, lead = f"{load} on {_gpus(args)}, {args.model}", f"SLO: {figures.slo(plan.setting.slo)}"
    write_whole(args.out / FILES[0], tune_report.page(title, outcome, lines, notes, lead))
    conditions = {"load": load, "slo": args.slo, "gpus": str(args.gpus), "model": args.model}
    data = tune_report.document(outcome, conditions, lines, notes)
    write_whole(args.out / FILES[1], json.dumps(data, indent=1, allow_nan=False) + "\n")


def _leave_configs(args: argparse.Namespace, plan: Plan, winner: Standing, served: Standing | None) -> None:
    """Of what servers can run, with what to expect of it; of the winner where that is another one. Raises OSError."""
    chosen = f"for {plan.setting.workload.name} on {_gpus(args)} by `pdmux tune` (docs/tune.md)."
    if served is not None:
        words = "" if served is winner else ", of those that servers can run,"
        _leave_config(args.out, plan, served, FILES[2], [f"{served.candidate}, chosen{words} {chosen}"])
        hopes = expected(served, plan.setting.slo)
        write_whole(args.out / FILES[3], expectations.text(hopes))
        dashboards.write(args.out / "dashboards", hopes)
    if winner is not served and winner.held is not None:
        why = plan.servers.lack(winner.candidate)
        _leave_config(
            args.out, plan, winner, FILES[4], [f"{winner.candidate}, chosen {chosen}", f"Not to be started yet: {why}"]
        )


def _leave_config(directory: Path, plan: Plan, of: Standing, name: str, comments: Sequence[str]) -> None:
    link = plan.setting.device(of.candidate.topology.tp, ()).link_bytes_per_s
    settings = configured(plan.setting.base, of.candidate, link)
    write_whole(directory / name, serve_config(of.candidate, settings, [*comments, command_here()], name))


def _gpus(args: argparse.Namespace) -> str:
    return f"{args.gpus} × {args.gpu or 'a profiled device'}"
