"""Published figures beside those of this simulator, with what is assumed and why they differ, in Markdown.

    python -m pdmux_ray.bench.literature [NAME …] [--costs silicon|roofline] [--assume KEY=VALUE …] [--trace FILE]

NAME: transfer, estimates, distserve, multiplexing-70b, multiplexing-34b, sensitivity, mooncake; without any, all of them.
docs/literature.md has what they print.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench.literature import distserve, estimates, mooncake, multiplexing, sensitivity, transfer
from pdmux_ray.bench.literature.fleets import StepTimes, Tell
from pdmux_ray.bench.literature.rows import Comparison
from pdmux_ray.bench.simulated_runs import only_errors
from pdmux_ray.costs.catalog import COSTS
from pdmux_ray.costs.sm_share import assumptions
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.report.table import print_line

NAMES = ("transfer", "estimates", "distserve", "multiplexing-70b", "multiplexing-34b", "sensitivity", "mooncake")


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.literature", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; without any, all")
    parser.add_argument("--costs", choices=COSTS, default="silicon", help="step times: measured (default), or a roofline's")
    parser.add_argument("--assume", action="append", default=[], metavar="KEY=VALUE", help="as of `pdmux simulate`")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="mooncake: its conversation trace, JSONL")
    parser.add_argument("--requests", type=int, metavar="N", help="mooncake: the trace's first N; without it, all")
    return parser


def chosen(args: argparse.Namespace, tell: Tell) -> list[Callable[[], Comparison]]:
    """What is to be compared. Raises ConfigError."""
    names = args.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"there is no comparison {unknown[0]!r}. Use {', '.join(NAMES)}.")
    if "mooncake" in names and args.trace is None:
        raise ConfigError("mooncake replays a trace: give --trace FILE, or the names of other comparisons.")
    steps = StepTimes(args.costs, assumptions(args.assume))
    known: Mapping[str, Callable[[], Comparison]] = {
        "transfer": partial(transfer.compare, steps),
        "estimates": partial(estimates.compare, steps),
        "distserve": partial(distserve.compare, steps, tell),
        "multiplexing-70b": partial(multiplexing.compare_70b, steps, tell),
        "multiplexing-34b": partial(multiplexing.compare_34b, steps, tell),
        "sensitivity": partial(sensitivity.compare, steps, tell),
        "mooncake": partial(mooncake.compare, args.trace, args.requests, steps, tell),
    }
    return [known[name] for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for a wrong argument, 130 after Ctrl-C."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    begin_s = time.monotonic()

    def tell(text: str) -> None:
        print_line(console, f"{time.monotonic() - begin_s:5.0f} s  {text}")

    try:
        with only_errors():
            for compare in chosen(args, tell):
                print("\n".join(compare().lines()), flush=True)
    except PdmuxError as error:
        print(f"literature: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
