"""Runs on a machine that also does other things."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 5

Run = TypeVar("Run")


def repeated(measure: Callable[[], Run], counts: Callable[[Run], bool]) -> Run:
    """The first run that counts, as studies take it: one that the client itself spoilt is made again. The last if none does."""
    for _ in range(TRIES - 1):
        if counts(run := measure()):
            return run
    return measure()
