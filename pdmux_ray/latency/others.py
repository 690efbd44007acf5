"""How much of this process's cores others use: what a measurement on a shared machine must know of itself. Linux."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guests are in user already


def others_s() -> float:
    """CPU seconds, since some moment, of everybody else on the cores that this process may use; 0 where that cannot be read."""
    own = os.times()
    try:
        lines = _STAT.read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return busy_s(lines, os.sched_getaffinity(0)) - own.user - own.system


def busy_s(stat: str, cores: set[int]) -> float:
    """CPU seconds of anybody, from the text of /proc/stat."""
    found = {int(core): values.split() for core, values in re.findall(r"^cpu(\d+) (.*)$", stat, re.MULTILINE)}
    return sum(int(found[core][column]) for core in cores if core in found for column in _BUSY) / _TICKS
