"""What the transport within one process does to what is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Weather:
    """How long things take, in seconds, and what becomes of writes. May be changed at any time."""

    latency_s: float = 0.0  # of a frame, and of a write besides its bytes
    bytes_per_s: float = math.inf  # of each instance's link, in each direction (`pipe`)
    note_s: float = 0.0  # from the end of a write to its note
    notice_s: float = 0.0  # from a death to its being seen
    tear: bool = False  # only half of the bytes arrive, and nobody is told
    fail: bool = False  # only half of the bytes arrive, and the writer is told
    notes: int = 1  # of each write
