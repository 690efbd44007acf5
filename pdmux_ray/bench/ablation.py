"""What the dispatcher is worth: by predicted latency, by the published batch-size rule, and a fixed half for each phase.

    python -m pdmux_ray.bench.ablation [--profile FILE] [--targets T,T,…] [--shares 0.15,0.25,0.35] [--together] [--out DIR]

One mixed workload (chats, and every third request a long prompt with a short answer), open loop, seeded: every server gets the
same requests at the same times, at each of the rates, which are shares of what an idle server in prefill_first carries in a
closed loop. The table has the latencies at one of the rates, the goodput over all of them.
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

from pdmux_ray.bench import bound, settings
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.outcome import measured, write_report
from pdmux_ray.bench.scaled_work import SLO, mixed
from pdmux_ray.bench.study import Extent, Shape, Study, measured_sessions, read_shares, reserve_all
from pdmux_ray.bench.study_tables import latencies
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.model.source import resolve
from pdmux_ray.report import figures

# Those of `settings.NAMES` that are compared, each with what it is.
WHAT = {
    "auto": "dispatcher, any mode",
    "split": "dispatcher, split only",
    "sglang": "published batch-size rule",
    "half": "fixed half split, whole prefills",
}
SHARES = (0.15, 0.25, 0.35, 0.5, 0.7)  # a closed loop carries about three times what holds these objectives
SECONDS = 15.0  # of arrivals of each run, at least


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.ablation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(WHAT), metavar="T,T,…", help=f"default: {','.join(WHAT)}")
    text = "that `pdmux profile` has made of this machine; without it one is measured first (at most 10 minutes)"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)
    shares = ",".join(f"{share:g}" for share in SHARES)
    parser.add_argument("--shares", default=shares, metavar="S,S,…", help=f"ascending; default {shares}")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of arrivals of each run, at least; default {SECONDS:g}"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each server at each rate; default 1")
    parser.add_argument("--together", action="store_true", help="keep all servers up; each takes its turn at each rate")
    parser.add_argument("--model", default="demo", help="Hugging Face directory that all serve; default: the demo model")
    parser.add_argument("--out", type=Path, default=Path("ablation"), metavar="DIR", help="default: ablation")
    parser.add_argument("--force", action="store_true", help="replace the results that DIR has")
    parser.add_argument("--slo", default=SLO, metavar="SLO", help=f"default {SLO}: times the idle server's")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_study(args: argparse.Namespace, console: Console) -> Study:
    """Raises ConfigError."""
    names = settings.chosen(args.targets, None)
    if args.rounds < 1 or not args.seconds > 0:
        raise ConfigError("--rounds and --seconds must be over 0.")
    extent = Extent(args.rounds, args.seconds, shares=read_shares(args.shares), together=args.together)
    workload = mixed()
    shape = Shape(workload, Offer(workload, duration_s=args.seconds, seed=args.seed), args.out)
    command = partial(_command, args.profile)
    deadline_s = time.monotonic() + extent.slowest_s(names, 1)
    return Study(names, command, resolve(args.model), extent, [shape], args.slo, args.seed, console, deadline_s)


def _command(profile: Path | None, name: str, slo: Slo | None) -> str:
    return settings.command(name, profile, slo)


def conclude(directory: Path, study: Study) -> None:
    """Writes the report, prints the tables, which `tables.md` has, too."""
    (shape,) = study.shapes
    sessions = list(measured_sessions(shape, study.names))
    if not sessions:
        return
    write_report(directory, sessions)
    predictions, _ = bound.table({session.name: bound.read(session.directory) for session in sessions})
    lines = [line for rate in shape.rates for line in (*latencies(sessions, rate, WHAT), "")]
    lines += ["Predictions", "", *predictions]
    (directory / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert study.terms is not None
    print(f"\n{shape.workload.name}; SLO: {figures.slo(study.terms.slo)}\n\n" + "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when something was not measured, 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    try:
        study = make_study(args, console)
        reserve_all([args.out, *(args.out / name for name in study.names)], args.force)
        study.describe()
        profile = settings.profile_for(study.names, args.profile, study.model, args.out, console)
        study = replace(study, command=partial(_command, profile))
    except PdmuxError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    with measured() as outcome:
        study.carry_out(outcome)
    conclude(args.out, study)
    whole = len(outcome.sessions) == len(study.names) and all(session.points() for session in outcome.sessions)
    return 130 if outcome.interrupted else 0 if whole and outcome.stopped is None else 1


if __name__ == "__main__":
    settings.end_in_order()
    sys.exit(main())
