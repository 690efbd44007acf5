"""Whether a process of this kernel lives: the one that is meant, since an id alone may be somebody else's by now."""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer.api import TransportError


def kernel() -> str:
    """Equal for two processes that see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def started(pid: int) -> int:
    """In clock ticks since the boot. Raises OSError."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def death_of(pid: int, since: int) -> int | None:
    """A file that can be read when the process that started then has died; None when it is dead already.

    Raises TransportError when that cannot be known: it must not be taken for dead while it writes.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise TransportError(f"process {pid} cannot be watched: {error}") from error
    try:
        if started(pid) == since:
            return pidfd
    except OSError as error:
        os.close(pidfd)
        raise TransportError(f"when process {pid} started cannot be read: {error}") from error
    os.close(pidfd)
    return None
