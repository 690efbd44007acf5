"""How many writes one connection has seen, each way: is a note of the peer's to be looked for, is one overdue? Pure.

NIXL wakes nobody when a note comes. So a writer says by a frame how many of its writes are over, and its peer looks for their
notes from then on. Not before: who looks while bytes travel takes cores from whoever moves them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.messages import MalformedError

_COUNT = struct.Struct(">Q")


@dataclass(slots=True)
class Tally:
    """Times are seconds of one clock."""

    _over: int = 0  # writes of ours
    _told: int = 0  # of these, the peer was told of so many
    _due: int = 0  # writes of the peer that are over
    _noted: int = 0  # notes of the peer's that have come
    _waiting_since: float = 0.0  # for a note that is due

    def end(self) -> None:
        """A write of ours is over."""
        self._over += 1

    def frame(self) -> bytes | None:
        """What the peer is to be told now, if anything."""
        if self._told == self._over:
            return None
        self._told = self._over
        return _COUNT.pack(self._over)

    def hear(self, frame: bytes, now: float) -> None:
        """The peer's frame. Raises MalformedError for a count that cannot be."""
        if len(frame) != _COUNT.size:
            raise MalformedError(f"{len(frame)} bytes where a count of writes belongs")
        (over,) = _COUNT.unpack(frame)
        if over < self._due:
            raise MalformedError(f"{over} writes are said to be over, after {self._due}")
        if self._noted >= self._due:
            self._waiting_since = now
        self._due = over

    def note(self, now: float) -> None:
        """A note of the peer's has come."""
        self._noted, self._waiting_since = self._noted + 1, now

    @property
    def looks(self) -> bool:
        """Whether a note of the peer's is due."""
        return self._noted < self._due

    def overdue(self, now: float, patience_s: float) -> str | None:
        """What is wrong when one is due and none has come for so long."""
        if not self.looks or now <= self._waiting_since + patience_s:
            return None
        return f"{self._due} of its writes are said to be over, and {self._noted} notes have come"
