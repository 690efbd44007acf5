"""How long a message takes between client and instance: what `--line` of `pdmux simulate` is about.

    python -m pdmux_ray.bench.line_time DIR…        DIR/SHAPE/TARGET, as `scripts/compare-peer` leaves them

A client counts from sending a request to its last token, its instance from the request's arrival to its end. What the client
counts more is the way there and back: HTTP, the front, the gateway with its tokenizer, the line. Half of it is a message's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.study import LAST_TIMELINE
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.trace import Trace, events_of
from pdmux_ray.report import figures


def ways_s(lifelines: Sequence[Lifeline], trace: Trace) -> Iterator[float]:
    """There and back, of each completed request. `trace`: of the one instance, up to their end. Raises ConfigError."""
    (instance,) = trace["otherData"]["instances"]
    came, ended = (_times(trace, instance, name) for name in ("arrival", "end"))
    sent = sorted((life for life in lifelines if math.isfinite(life.sent_s)), key=lambda life: life.sent_s)
    latest = list(came.items())[-len(sent) :]
    if [life.prompt_tokens for life in sent] != [args["prompt tokens"] for _, (_, args) in latest]:
        raise ConfigError("the timeline's latest requests are not those of the last run")
    for life, (request, (came_s, _)) in zip(sent, latest, strict=True):
        if life.ending is Ending.COMPLETE and request in ended:
            yield life.token_s[-1] - life.sent_s - (ended[request][0] - came_s)


def _times(trace: Trace, instance: str, name: str) -> dict[str, tuple[float, dict[str, object]]]:
    """By request, in order of time."""
    events = sorted(events_of(trace, instance, "i", name), key=lambda event: event["ts"])
    return {event["args"]["request"]: (event["ts"] / 1e6, event["args"]) for event in events}


def ways_below(directory: Path) -> Iterator[float]:
    """Of the last run of each server. Raises ConfigError."""
    for path in sorted(directory.rglob(LAST_TIMELINE)):
        try:
            record = Session.read(path.parent.name, path.parent).records[-1]
            yield from ways_s(record.lifelines, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{path.parent} is no SHAPE/TARGET as `scripts/compare-peer` leaves them ({error!r}).") from None


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.line_time", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="that scripts/compare-peer has left")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 when there is nothing to measure."""
    try:
        found = sorted(way_s for directory in parser().parse_args(argv).directories for way_s in ways_below(directory))
        if not found:
            raise ConfigError("no request of any run was completed")
    except PdmuxError as error:
        print(f"line_time: {figures.printable(str(error))}", file=sys.stderr)
        return 2
    p99_s, mean_s = found[int(0.99 * (len(found) - 1))], fmean(found)
    print(
        f"{len(found)} requests: there and back {figures.ms(mean_s)} ms in the mean, median {figures.ms(median(found))}, p99 "
        f"{figures.ms(p99_s)}. A message takes half of the mean: --line {mean_s / 2:.2g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
