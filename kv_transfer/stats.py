"""What an endpoint counts. Only its thread writes; anybody may take a `snapshot`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_transfer.api import FenceReason, LossReason


@dataclass(slots=True)
class Stats:
    """Totals since the start, but for the gauge `quarantined_pages`. Of each handoff, Ds count one half and Ps the other.

    Counts by reason begin at 0 for every one: who watches a total sees the first, too.
    """

    # as D
    fetched: int = 0  # handoffs that the engine asked for
    landed: int = 0
    lost: Counter[LossReason] = field(default_factory=lambda: Counter(dict.fromkeys(LossReason, 0)))
    landed_tokens: int = 0
    landed_bytes: int = 0
    landing_s: float = 0.0  # from `fetch` to Landed, summed over what landed
    wasted_bytes: int = 0  # that had come for handoffs that were lost
    quarantined_pages: int = 0  # now
    quarantined: int = 0  # handoffs that were lost while the peer could still write
    quarantine_s: float = 0.0  # summed over those whose quarantine has ended
    # as P
    wanted: int = 0
    sent: int = 0
    unsent: Counter[LossReason] = field(default_factory=lambda: Counter(dict.fromkeys(LossReason, 0)))
    written_bytes: int = 0  # in writes that went well
    written_s: float = 0.0  # from the post of such a write to its end, summed
    writes: int = 0
    writes_failed: int = 0
    # as both
    fenced: Counter[FenceReason] = field(default_factory=lambda: Counter(dict.fromkeys(FenceReason, 0)))
    peers_refused: int = 0
    peers_silent: int = 0

    def snapshot(self) -> dict[str, float | dict[str, int]]:
        """Every field by its name; counts by reason as {value of the reason: count}."""
        values: dict[str, float | dict[str, int]] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            values[name] = {reason.value: n for reason, n in list(value.items())} if isinstance(value, Counter) else value
        return values
