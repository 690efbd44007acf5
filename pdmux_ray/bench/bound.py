"""How good the dispatcher's predictions were: how many steps took longer than their 99 % bound, and how far they were off.

    python -m pdmux_ray.bench.bound DIR|URL…

A directory is one that `scripts/compare-peer` or `python -m pdmux_ray.bench.ablation` has left, or one target's inside it; of a
running server the steps of its last `--seconds` count. Exit code 1 when a limit is missed, or nothing was predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdmux_ray.bench.load import targets
from pdmux_ray.bench.timeline import Fetched, fetch
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.predictions import Judged
from pdmux_ray.metrics.trace import KINDS, slices_of
from pdmux_ray.report import figures

FILE = "steps.jsonl"  # [kind, mode, predicted, bound, measured], seconds
OVER_LIMIT = 0.02  # share of steps over their bound
ERROR_LIMIT = 0.10  # median error


class TimedWork(NamedTuple):
    """One measured piece of work."""

    kind: str  # of `metrics.trace.KINDS`
    mode: str
    predicted_s: float | None  # None: nothing was predicted
    bound_s: float | None
    measured_s: float


def steps_of(fetched: Fetched, begin_s: float) -> list[TimedWork]:
    """Of all instances, those that began at `begin_s` of this process' `time.perf_counter` or later."""
    slices = [each for name in fetched.instances for each in slices_of(fetched.trace, name)]
    return [
        TimedWork(each.kind, each.mode, each.predicted_s, each.bound_s, each.took_s)
        for each in slices
        if each.counted and each.begin_s + fetched.offset_s >= begin_s
    ]


def mode_shares(steps: Iterable[TimedWork]) -> dict[str, float]:
    """Mode -> its share of the prefill work's time: which way of sharing the device was chosen while there was a choice."""
    seconds: dict[str, float] = {}
    for step in steps:
        if step.kind != "decode":
            seconds[step.mode] = seconds.get(step.mode, 0.0) + step.measured_s
    total_s = sum(seconds.values())
    return {mode: of_mode / total_s for mode, of_mode in sorted(seconds.items(), key=lambda item: -item[1])} if total_s else {}


def table(by_target: Mapping[str, Sequence[TimedWork]]) -> tuple[list[str], bool]:
    """Lines in Markdown, a row for each target and kind of work, the last one all together; whether that one holds."""
    lines = ["| target | work | predicted steps | over the bound | median error | p90 error |", "|---|---|---|---|---|---|"]
    for target, steps in by_target.items():
        for kind in KINDS:
            if judged := Judged.of(_times(step for step in steps if step.kind == kind)):
                lines.append(_row(target, kind, judged))
    whole = Judged.of(_times(step for steps in by_target.values() for step in steps))
    if whole is None:
        return [*lines, "| all | | 0 | – | – | – |"], False
    lines.append(_row("**all**", f"limits {OVER_LIMIT:.0%} and {ERROR_LIMIT:.0%}", whole))
    return lines, whole.over_share <= OVER_LIMIT and whole.median_error <= ERROR_LIMIT


def _times(steps: Iterable[TimedWork]) -> Iterator[tuple[float | None, float | None, float]]:
    return ((step.predicted_s, step.bound_s, step.measured_s) for step in steps)


def _row(target: str, work: str, judged: Judged) -> str:
    shares = (judged.over_share, judged.median_error, judged.p90_error)
    return f"| {target} | {work} | {judged.steps:,} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"


def append(directory: Path, steps: Iterable[TimedWork]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps([*step], separators=(",", ":")) + "\n" for step in steps)


def read(directory: Path) -> list[TimedWork]:
    """None where no server told its steps. Raises ConfigError."""
    path, found = directory / FILE, list[TimedWork]()
    if not path.exists():
        return found
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(TimedWork(*json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is no step: {error}") from None
    return found


def read_all(directory: Path) -> dict[str, list[TimedWork]]:
    """Target -> its steps, of this directory and all below it; a target is named by its directory. Raises ConfigError."""
    found: dict[str, list[TimedWork]] = {}
    for path in sorted(directory.rglob(FILE)):
        found.setdefault(path.parent.resolve().name, []).extend(read(path.parent))
    return found


def _of_server(url: str, seconds: float) -> list[TimedWork]:
    fetched = fetch(targets.base_url(url), seconds)
    if fetched is None:
        raise targets.TargetError(f"{url} tells no timeline: it is no server of pdmux-ray, or an older one.")
    return steps_of(fetched, time.perf_counter() - seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a limit is missed or nothing was predicted, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.bound", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("places", nargs="+", metavar="DIR|URL")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a running server's timeline; default 600")
    args = parser.parse_args(argv)
    found: dict[str, list[TimedWork]] = {}
    try:
        for place in args.places:
            told = {place: _of_server(place, args.seconds)} if targets.is_url(place) else read_all(Path(place))
            for target, steps in told.items():
                found.setdefault(target, []).extend(steps)
        lines, holds = table(found)
    except PdmuxError as error:
        print(f"bound: {figures.printable(str(error))}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
