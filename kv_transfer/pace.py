"""When to look again at what tells nobody that it is over: writes and notes of NIXL. Seconds.

The pause before a look is a part of the time that has been waited. So what is over is found late by that part at most, the
looks that it takes grow with the logarithm of its time, and between any two of them the core and Python's lock are free for
whoever computes. Two times there is no pause: for a moment after a write was posted, since short ones are over then; and after
a look in which NIXL was busy, because it copies and sends while it is asked.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

EAGER_S = 200e-6  # a write is asked for without a pause
PART = 1 / 8
SHORTEST_S = 20e-6  # more than a look takes in which NIXL has nothing to do
LONGEST_S = 1e-3
_SLACK_NS = 1000

log = logging.getLogger("kv_transfer")


class Pace:
    """Owner: the thread that waits."""

    def __init__(self) -> None:
        self._exact = False

    def pause_s(self, waited_s: float, look_s: float, writes: bool) -> float:
        """Until the next look, after so long a wait and a last look that took `look_s`. `writes`: not only notes are due."""
        if not self._exact:
            self._exact = True
            _sleep_exactly()
        if look_s > SHORTEST_S or (writes and waited_s < EAGER_S):
            return 0.0
        return min(max(PART * waited_s, SHORTEST_S), LONGEST_S)


def _sleep_exactly() -> None:
    """From now on the calling thread's sleeps are as long as they should be: Linux adds up to 50 µs to each without that."""
    try:
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(_SLACK_NS), encoding="ascii")
    except OSError as error:
        log.info("short sleeps are some 50 µs longer than they should be: %s", error)
