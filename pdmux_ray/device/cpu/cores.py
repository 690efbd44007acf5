"""Which cores this process may use, and how many."""

from __future__ import annotations

import math
import os
from pathlib import Path

_TOPOLOGY = ("physical_package_id", "core_id")


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores of the process's affinity mask, or fewer where a container's CPU quota gives it less time than that."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def neighbouring_cores(system: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The affinity mask's cores, hardware threads of one physical core side by side: what cuts the list in two parts at most
    one of them."""

    def place(cpu: int) -> tuple[list[int], int]:
        try:
            return [int((system / f"cpu{cpu}" / "topology" / name).read_text()) for name in _TOPOLOGY], cpu
        except (OSError, ValueError):
            return [], cpu

    return sorted(os.sched_getaffinity(0), key=place)
