"""A race for the highest rate that holds: which entry is tried next, at which rate of a grid that all share. Pure.

All entries get the same requests at a rate (common random numbers), so one that clearly fails at a rate that another one of its
group holds is beaten, and is not tried again: most entries cost one run. Who begins is tried at the leader's rate; who holds it
goes on, in strides that double, then by bisection. Entries begin in their order, so likely winners should be the first ones.

    race = Race(len(rates))
    race.add(start, group)                                  each entry
    while (probe := race.next()) is not None:              several may be under way at once
        race.note(probe, *result_of(probe))
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pdmux_ray.tune.grid import GridSearch

USUAL_RUNS = 5  # of an entry that is searched to its end


@dataclass(frozen=True, slots=True)
class Probe:
    """One run: an entry, and the index of a rate."""

    entry: int
    index: int


@dataclass(slots=True)
class _Entry:
    start: int  # where it is tried first while nobody leads
    group: Hashable
    search: GridSearch | None = None
    clear: int | None = None  # the lowest index at which it clearly failed
    to_the_end: bool = False
    going: bool = False

    @property
    def held(self) -> int | None:
        return self.search.held if self.search else None

    @property
    def over(self) -> bool:
        return self.search is not None and self.search.next() is None


class Race:
    """Owner: who runs the probes, and notes what came of each one that `next` gave, once."""

    def __init__(self, size: int) -> None:
        """`size`: of the grid."""
        self._size = size
        self._entries: list[_Entry] = []

    def add(self, start: int, group: Hashable = None) -> int:
        """One entry more; its number. `start`: an index of the grid."""
        self._entries.append(_Entry(start, group))
        return len(self._entries) - 1

    def next(self) -> Probe | None:
        """None while all that is left is under way, and at the end. Who has begun goes first, who holds most before others."""
        open_ = [(number, entry) for number, entry in enumerate(self._entries) if self._is_open(entry)]
        if not open_:
            return None
        number, entry = min(open_, key=lambda each: (each[1].search is None, -(each[1].held or 0), each[0]))
        if entry.search is None:
            leading = self.leading(entry.group)
            entry.search = GridSearch(self._size, entry.start if leading is None else leading)
        index = entry.search.next()
        assert index is not None
        entry.going = True
        return Probe(number, index)

    def note(self, probe: Probe, held: bool, clear: bool) -> None:
        """`clear`: that it did not hold is no chance."""
        entry = self._entries[probe.entry]
        assert entry.search is not None
        entry.search.note(probe.index, held)
        entry.going = False
        if not held and clear:
            entry.clear = probe.index if entry.clear is None else min(entry.clear, probe.index)

    def search_to_the_end(self, entries: Iterable[int]) -> None:
        """These are tried until their own highest rate is known, whoever leads."""
        for number in entries:
            self._entries[number].to_the_end = True

    def leading(self, group: Hashable = None) -> int | None:
        """The highest index that anybody of the group has held."""
        return max((entry.held for entry in self._entries if entry.group == group and entry.held is not None), default=None)

    def held(self, entry: int) -> int | None:
        """The highest index that it has held."""
        return self._entries[entry].held

    def beaten(self, entry: int) -> bool:
        """Whether it was left before its highest rate was known."""
        found = self._entries[entry]
        return not found.over and self._is_beaten(found)

    def left(self) -> float:
        """About how many runs it will still take."""
        waiting = [entry for entry in self._entries if entry.going or self._is_open(entry)]
        begun = sum(entry.search is not None or entry.to_the_end for entry in waiting)
        return begun * USUAL_RUNS / 2 + (len(waiting) - begun) * 1.5

    def _is_open(self, entry: _Entry) -> bool:
        return not (entry.going or entry.over or self._is_beaten(entry))

    def _is_beaten(self, entry: _Entry) -> bool:
        if entry.to_the_end or entry.clear is None:
            return False
        leading = self.leading(entry.group)
        return leading is not None and entry.clear <= leading
