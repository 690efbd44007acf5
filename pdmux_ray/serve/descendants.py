"""Every process that came of this one, however deep and whatever became of the processes between."""

from __future__ import annotations

import contextlib
import ctypes
import signal

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process (Linux), so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """This process gets SIGTERM when its parent ends, however that happens (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_all() -> None:
    """Returns when none is left. Call `adopt_orphans` before starting any."""
    while left := living():
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def living(ancestor: psutil.Process | None = None) -> list[psutil.Process]:
    """Descendants of `ancestor` (None: this process) that are no zombies."""
    found = []
    for process in (ancestor or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
