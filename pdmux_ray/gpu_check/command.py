"""The command line. Light to import; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdmux_ray.errors import ConfigError

if TYPE_CHECKING:
    from pdmux_ray.gpu_check.lab import Lab
    from pdmux_ray.gpu_check.registry import Check
    from pdmux_ray.gpu_check.report import Report, Row

TOTAL_S = 285.0  # of a whole run: the last check, which measures as long as there is time, ends by then


def add_gpu_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks and measures the CUDA device on the GPU at hand; made to take less than five minutes. See docs/cuda.md."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where report.json goes, row by row")
    parser.add_argument("--only", metavar="NAMES", help="checks, with commas between them; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and no headline: is it right, more than how fast")
    parser.add_argument(
        "--device",
        choices=("cuda", "recording"),
        default="cuda",
        help="recording: every check on the CPU with a tiny model, in Triton's interpreter; what is about speed is not judged",
    )
    parser.add_argument("--total-s", type=float, default=TOTAL_S, metavar="S", help="the headline is surer with more time")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """0: every limit that was judged holds. 1: one does not. 2, by a PdmuxError: nothing could be checked. 130: interrupted;
    report.json has what was measured."""
    if args.device == "recording":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from pdmux_ray.gpu_check.lab import Lab
    from pdmux_ray.gpu_check.registry import chosen
    from pdmux_ray.gpu_check.report import Report

    checks = chosen(args.only, args.quick)
    began_s = time.monotonic()
    lab = Lab.open(args.device, args.quick, args.out, began_s + args.total_s)
    report = _open_report(Report, args)
    try:
        with _interruptible():
            _run_checks(checks, lab, report)
    except KeyboardInterrupt:
        _say(f"\ninterrupted; what was measured is in {report.path}")
        return 130
    finally:
        _close(lab)
    report.close(time.monotonic() - began_s)
    return _conclude(report, time.monotonic() - began_s)


def _open_report(kind: type[Report], args: argparse.Namespace) -> Report:
    from pdmux_ray import __version__

    head = {"pdmux_ray": __version__, "device": args.device, "quick": args.quick, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    try:
        return kind(args.out, head, _say)
    except OSError as error:
        raise ConfigError(f"{args.out} cannot be written to: {error.strerror}. Name another directory with --out") from None


@contextmanager
def _no_passes() -> Iterator[None]:
    """The garbage collector passes when a model is freed, and never amid what is timed: with torch loaded it takes as long as
    steps do."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_passes()
def _run_checks(checks: Sequence[Check], lab: Lab, report: Report) -> None:
    """A check that raises has failed, unless the device is too small for it; the others go on."""
    left_s = sum(check.seconds for check in checks)
    for number, check in enumerate(checks, 1):
        _say(f"\n[{number}/{len(checks)}] {check.name}: {check.title}   (about {left_s:.0f} s left)")
        report.begin(check.name, check.title)
        began_s, failed = time.monotonic(), False
        try:
            for row in check.run(lab):
                report.add(row)
        except Exception as error:
            report.add(_ended_by(error))
            failed = True
        if failed:
            _close(lab)  # its model may be amid a step
        report.end(time.monotonic() - began_s)
        left_s = min(left_s - check.seconds, max(lab.deadline_s - time.monotonic(), 0.0))


def _ended_by(error: Exception) -> Row:
    """A device that is too small for a check has not failed it."""
    from pdmux_ray.gpu_check.lab import SmallDeviceError
    from pdmux_ray.gpu_check.report import Row, Verdict

    if isinstance(error, SmallDeviceError):
        return Row("the GPU is too small for it", "not run", verdict=Verdict.NOT_JUDGED, note=str(error))
    traceback.print_exception(error)
    return Row("it ended with an error", type(error).__name__, verdict=Verdict.FAILED, note=str(error))


def _conclude(report: Report, seconds: float) -> int:
    from pdmux_ray.gpu_check.report import Verdict, summary

    _say(f"\n{summary(report.parts)}")
    outcome = "a limit does not hold" if report.failed else "every limit that was judged holds"
    unjudged = sum(row.verdict is Verdict.NOT_JUDGED for part in report.parts for row in part.rows)
    _say(f"\n{outcome}; {unjudged} were not judged; {seconds:.0f} s; {report.path}")
    return 1 if report.failed else 0


def _close(lab: Lab) -> None:
    """Whatever comes of it, what was measured is concluded."""
    try:
        lab.close()
    except Exception as error:
        traceback.print_exception(error)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, flush=True)
