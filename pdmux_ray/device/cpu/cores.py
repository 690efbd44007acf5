"""Which cores this process may use, and how many."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def own_cores(place: int, count: int | None) -> Iterator[None]:
    """Within, the calling thread sees only `count` of its cores: those of the `place`-th of several that share the machine.

    So threads that two instances pin do not meet on one core while another one is idle. All cores when `count` is None, and
    where there are not enough.
    """
    cores = neighbouring_cores()
    own = cores if count is None else cores[place * count : (place + 1) * count]
    if count is not None and len(own) < count:
        own = cores
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
