"""Goodput of this project's modes beside another server's, for four kinds of work, on one machine; what must hold of it; and
how good the predictions of the lanes' dispatcher were meanwhile.

    scripts/compare-peer [--peer 'COMMAND {model} {port}'] [--profile FILE] [--targets T,T,…] [--quick] [--out DIR]

Each command serves the Hugging Face directory {model} on loopback port {port}. An idle server in prefill_first sets the measure
for all: its latency makes the SLO, and what it carries makes the grid of rates in which every server's last rate that holds is
searched. The SLO is the objective of the modes that plan by predicted time, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench import bound, claims, settings
from pdmux_ray.bench.load.compare import conclude
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.outcome import measured, write_report
from pdmux_ray.bench.scaled_work import SHAPES, SLO, scaled
from pdmux_ray.bench.study import REQUESTS, Extent, Shape, Study, measured_sessions, read_shares, reserve_all
from pdmux_ray.bench.study_tables import goodputs
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures

TARGETS = (*settings.FIXED, settings.AUTO)
MINUTES, QUICK_MINUTES = 40.0, 8.0
QUICK_REQUESTS = 10  # of a run, where there is no time for more


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/compare-peer", description=(__doc__ or "").split("\n\n")[0])
    text = "of another server, with {model} and {port}; without it only ours run"
    parser.add_argument("--peer", metavar="COMMAND", help=text)
    text = f"of {', '.join(settings.NAMES)} and peer; default: {','.join(TARGETS)} and the peer, if there is one"
    parser.add_argument("--targets", metavar="T,T,…", help=text)
    text = "that `pdmux profile` has made of this machine; without it one is measured first (at most 10 minutes)"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)
    parser.add_argument("--model", default="demo", help="Hugging Face directory that all serve; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("compare-peer"), metavar="DIR", help="default: compare-peer")
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")
    text = f"that it should take, the profile aside: fewer make shorter runs and wider intervals; default {MINUTES:g}"
    parser.add_argument("--minutes", type=float, metavar="M", help=text)
    parser.add_argument("--quick", action="store_true", help=f"runs too short to say much, for {QUICK_MINUTES:g} minutes")
    parser.add_argument("--rounds", type=int, default=1, help="searches of each server on each workload; default 1")
    text = (
        "rates that all servers are given, instead of a search of each: shares of what an idle one carries, such as 0.7,1,1.4"
    )
    parser.add_argument("--shares", metavar="S,S,…", help=text)
    text = "keep all servers up and give each one run of each rate in turn: for a machine whose speed drifts; needs --shares"
    parser.add_argument("--together", action="store_true", help=text)
    parser.add_argument("--workloads", default=",".join(SHAPES), metavar="W,W,…", help="default: all four")
    parser.add_argument("--slo", default=SLO, metavar="SLO", help=f"default {SLO}: times the idle server's")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_study(args: argparse.Namespace, console: Console) -> Study:
    """Raises ConfigError."""
    names = settings.chosen(args.targets or ",".join([*TARGETS, *([settings.PEER] if args.peer else [])]), args.peer)
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    if args.rounds < 1 or not minutes > 0:
        raise ConfigError("--rounds and --minutes must be over 0.")
    workloads = list(dict.fromkeys(args.workloads.split(",")))
    requests = QUICK_REQUESTS if args.quick else REQUESTS
    shares = read_shares(args.shares) if args.shares else ()
    if args.together and not shares:
        raise ConfigError("--together needs --shares: a search goes on from what the server before has shown.")
    extent = Extent.within(minutes, args.rounds, names, len(workloads), requests, shares, args.together)
    shapes = []
    for name in workloads:
        workload = scaled(name)
        offer = Offer(workload, duration_s=extent.seconds, seed=args.seed)
        shapes.append(Shape(workload, offer, args.out / name.replace(":", "-").replace("/", "-")))
    command = partial(_command, args.profile, args.peer)
    deadline_s = time.monotonic() + minutes * 60
    return Study(names, command, resolve(args.model), extent, shapes, args.slo, args.seed, console, deadline_s)


def _command(profile: Path | None, peer: str | None, name: str, slo: Slo | None) -> str:
    return settings.command(name, profile, slo, peer)


def conclude_all(directory: Path, study: Study) -> bool:
    """Writes a report and comparison for each shape, and prints the tables, which `tables.md` has, too. Whether everything that
    must hold was shown to hold."""
    for shape in study.shapes:
        sessions = list(measured_sessions(shape, study.names))
        if sessions:
            write_report(shape.directory, sessions)
        if len(sessions) > 1:
            conclude(shape.directory, sessions)
    by_shape = {s.workload.name: {one.name: one for one in measured_sessions(s, study.names)} for s in study.shapes}
    found = claims.claims(by_shape)
    steps = {shape.workload.name: _steps(shape, study.names) for shape in study.shapes}
    by_target = {name: [one for of in steps.values() for one in of.get(name, ())] for name in study.names}
    predictions, predicted_well = bound.table(by_target)
    lines = [
        *("Goodput, requests/s (95 % interval)", "", *goodputs(study.shapes, study.names), ""),
        *("What must hold", "", *claims.table(found), ""),
        *("How the prefill work was done, by share of its time", "", *mode_table(steps), ""),
        *("Predictions", "", *predictions),
    ]
    (directory / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines))
    return claims.all_hold(found) and (predicted_well or not settings.have_lanes(study.names))


def mode_table(steps: dict[str, dict[str, list[bound.TimedWork]]]) -> list[str]:
    """A row for each shape and server that chose among modes."""
    lines = ["| workload | target | modes |", "|---|---|---|"]
    for shape, by_target in steps.items():
        for target, of_target in by_target.items():
            shares = bound.mode_shares(of_target)
            if target == settings.AUTO or len(shares) > 1:
                words = ", ".join(f"{mode} {share:.0%}" for mode, share in shares.items()) or figures.NONE
                lines.append(f"| {shape} | {target} | {words} |")
    return lines


def _steps(shape: Shape, names: Sequence[str]) -> dict[str, list[bound.TimedWork]]:
    return {name: steps for name in names if (steps := bound.read(shape.directory / name))}


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when something does not hold or was not measured, 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    try:
        study = make_study(args, console)
        reserve_all([d for s in study.shapes for d in (s.directory, *(s.directory / name for name in study.names))], args.force)
        study.describe()
        began_s = time.monotonic()
        profile = settings.profile_for(study.names, args.profile, study.model, args.out, console)
        study = replace(study, command=partial(_command, profile, args.peer))
        study.deadline_s += time.monotonic() - began_s
    except PdmuxError as error:
        print(f"scripts/compare-peer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    with measured() as outcome:
        study.carry_out(outcome)
    holds = conclude_all(args.out, study)
    print(f"\n{args.out}, after {(time.monotonic() - began_s) / 60:.1f} minutes")
    whole = outcome.stopped is None and all(len(shape.sessions) == len(study.names) for shape in study.shapes)
    return 130 if outcome.interrupted else 0 if whole and holds else 1


if __name__ == "__main__":
    settings.end_in_order()
    sys.exit(main())
