"""What a command leaves, however it ends: its files, its figures on the terminal, its exit code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdmux_ray.bench.load.session import REQUESTS_FILE, UNITS_FILE, Session
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.report import figures, load_report, table

COMPARISON_FILE = "comparison.json"
TIMELINE_FILE = "timeline-{}.json"  # of a simulated rate

_held: dict[Path, int] = {}  # directory -> its open file, which has the lock


def reserve(directory: Path, force: bool) -> None:
    """Makes the directory for results. Raises ConfigError when it has some already (`force` removes them), when another
    process is writing its own there, or when it cannot be written."""
    timelines = sorted(path.name for path in directory.glob(TIMELINE_FILE.format("*")))
    names = (summaries.FILE_NAME, REQUESTS_FILE, UNITS_FILE, load_report.FILE_NAME, COMPARISON_FILE, *timelines)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _hold(directory)
        there = [name for name in names if (directory / name).exists()]
        if there and not force:
            raise ConfigError(
                f"{directory} has {', '.join(there)} already. Choose another --out, or replace them with --force."
            )
        for name in there:
            (directory / name).unlink()
        (directory / REQUESTS_FILE).touch()
        (directory / REQUESTS_FILE).unlink()
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be written: {error}") from None


def _hold(directory: Path) -> None:
    """For as long as this process lives: the samples of two measurements in one file belong to neither. Raises ConfigError."""
    place = directory.resolve()
    if place in _held:
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another measurement is writing to {directory}. Wait for it, or choose another --out.") from None
    except OSError:
        os.close(handle)  # a file system without locks
    else:
        _held[place] = handle


@dataclass(slots=True)
class Outcome:
    """What a command has measured when it ends, however it ends."""

    sessions: list[Session]
    stopped: str | None = None  # why it ended before its plan did
    interrupted: bool = False

    def stop(self, why: str) -> None:
        """Notes what ended it early, and says so once."""
        if why != self.stopped:
            say(why)
        self.stopped = why

    def finish(self, directory: Path) -> int:
        """Writes the report, prints the figures, returns the exit code."""
        measured = [session for session in self.sessions if session.records]
        if measured:
            try:
                written = self._write(directory, measured)
            except KeyboardInterrupt:
                say(f"interrupted before the report was whole: `pdmux bench report {directory}` builds it")
                return 130
            console = Console()
            table.print_runs(console, [session.summary() for session in measured])
            if written:
                table.print_line(console, str(directory / load_report.FILE_NAME))
        if self.interrupted:
            return 130
        useless = [session for session in self.sessions if _useless(session)]
        return 1 if self.stopped or useless or not self.sessions else 0

    def _write(self, directory: Path, sessions: Sequence[Session]) -> bool:
        """Whether it could; the figures are printed in any case."""
        try:
            for session in sessions:
                if not session.finished:
                    self._mark(session)
                    session.write()
            write_report(directory, sessions)
        except OSError as error:
            self.stop(f"the results cannot be written: {error}")
            return False
        return True

    def _mark(self, session: Session) -> None:
        if self.interrupted:
            session.note("INTERRUPTED before the end of its plan.")
        elif self.stopped:
            session.note(f"STOPPED before the end of its plan: {self.stopped}")


@contextlib.contextmanager
def measured() -> Iterator[Outcome]:
    """Turns what ends a measurement early into an outcome, so that what there is gets written."""
    outcome = Outcome([])
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.interrupted = True
        say("interrupted; what has ended is written")
    except ConfigError:
        raise
    except PdmuxError as error:
        outcome.stop(str(error))
    except OSError as error:
        outcome.stop(f"the results cannot be written: {error}")


def _useless(session: Session) -> bool:
    """Says so when no request completed at all."""
    complete = any(lifeline.ending is Ending.COMPLETE for record in session.records for lifeline in record.lifelines)
    if not complete:
        errors = [lifeline.error for record in session.records for lifeline in record.lifelines if lifeline.error]
        say(f"{session.name}: no request completed{f'; the first error: {errors[0]}' if errors else ''}")
    return not complete or any(record.invalid for record in session.records)


def write_report(directory: Path, sessions: Sequence[Session]) -> Path:
    """report.html of all sessions."""
    runs = [
        load_report.TargetRuns(
            session.name,
            summary := session.summary(),
            [(run, record.lifelines) for run, record in zip(summary.runs, session.records, strict=True)],
            session.units,
        )
        for session in sessions
    ]
    notes = list(dict.fromkeys(note for session in sessions for note in session.notes))
    workloads = dict.fromkeys(session.conditions.get("workload", "load") for session in sessions)
    title = f"{' and '.join(workloads)} on {' and '.join(session.name for session in sessions)}"
    return load_report.write_report(directory, title, runs, notes)


def say(text: str) -> None:
    print(f"pdmux bench: {figures.printable(text)}", file=sys.stderr, flush=True)
