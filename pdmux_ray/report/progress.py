"""How far a long command is, and when it will be done: a live line on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from pdmux_ray.report import figures

LIVE_EVERY_S = 0.5  # drawing must not take a load generator's time, so there is no thread that draws
LINE_EVERY_S = 5.0


class Progress:
    """Owner: the command, on one thread. `total` is in any unit (seconds, requests), the same as `done` of `update`.

        with Progress(total=120.0, console=Console(stderr=True)) as progress:
            progress.update(done=30.0, note="rate 4: 118 sent, 12 in flight")

    `clock`: seconds.
    """

    def __init__(self, total: float, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._console, self._clock = total, console, clock
        self._begun_s = self._drawn_s = clock()
        self._bar = Bar(
            *(BarColumn(24), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[left]}", markup=False)),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, left="", note="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, done: float, note: str = "") -> None:
        """Cheap: it draws only when the last time is long enough ago, and at the end."""
        now_s = self._clock()
        every_s = LIVE_EVERY_S if self._console.is_terminal else LINE_EVERY_S
        if now_s - self._drawn_s < every_s and done < self._total:
            return
        self._drawn_s = now_s
        note, left = figures.printable(note), self._left(done, now_s)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, left=left, note=note, refresh=True)
        else:
            share = min(100.0, 100 * done / self._total) if self._total else 100.0
            parts = [f"{share:.0f} %", left, note]
            self._console.print(", ".join(part for part in parts if part), soft_wrap=True, markup=False, highlight=False)

    def _left(self, done: float, now_s: float) -> str:
        elapsed_s = now_s - self._begun_s
        if done >= self._total:
            return f"done after {_clock_time(elapsed_s)}"
        return f"about {_clock_time(elapsed_s / done * (self._total - done))} left" if done > 0 else ""


def _clock_time(seconds: float) -> str:
    """45 s, 3:05 min, 1:02 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
