"""The units of each lane over time: from the records of a timeline, of several instances together, as means. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdmux_ray.engine.timeline import PrefillBlock, Record, Step

BRIDGE_S = 0.002  # a lane that waits no longer for the host keeps its units in the picture


class Use(NamedTuple):
    """A lane at work."""

    begin_s: float
    end_s: float
    units: float


class UnitsChange(NamedTuple):
    """From `at_s` on the lanes work on so many units; 0 is a lane that rests."""

    at_s: float
    prefill_units: float
    decode_units: float


def units_changes(records: Iterable[Record]) -> list[UnitsChange]:
    """The units of both lanes from change to change. A pass that prefills and decodes at once shares its units by tokens."""
    lanes: tuple[list[Use], list[Use]] = ([], [])
    for record in records:
        for lane, use in zip(lanes, _uses(record), strict=True):
            if use is not None and use.units:
                lane.append(use)
    held, by_time = [0.0, 0.0], dict[float, UnitsChange]()
    for at_s, lane_index, value in sorted((at_s, i, value) for i, lane in enumerate(lanes) for at_s, value in _changes(lane)):
        held[lane_index] = value
        by_time[at_s] = UnitsChange(at_s, *held)
    found: list[UnitsChange] = []
    for change in by_time.values():
        if not found or found[-1][1:] != change[1:]:
            found.append(change)
    return found


def _uses(record: Record) -> tuple[Use | None, Use | None]:
    """Of the prefill lane, of the decode lane."""
    match record:
        case PrefillBlock():
            return Use(record.begin_s, record.end_s, record.prefill_units), None
        case Step() if tokens := record.prefill_tokens + record.decodes:
            prefill = round(record.decode_units * record.prefill_tokens / tokens, 2)
            return Use(record.begin_s, record.end_s, prefill), Use(record.begin_s, record.end_s, record.decode_units - prefill)
    return None, None


def _changes(uses: Sequence[Use]) -> Iterable[tuple[float, float]]:
    """(from when on, units) of one lane."""
    end_s: float | None = None
    for use in sorted(uses):
        if end_s is not None and use.begin_s - end_s > BRIDGE_S:
            yield end_s, 0.0
        yield use.begin_s, use.units
        end_s = use.end_s
    if end_s is not None:
        yield end_s, 0.0


def together(instances: Sequence[Sequence[UnitsChange]]) -> list[UnitsChange]:
    """The units of several instances added up."""
    steps = sorted((change.at_s, index, change) for index, changes in enumerate(instances) for change in changes)
    held = [UnitsChange(0.0, 0.0, 0.0)] * len(instances)
    found = []
    for at_s, index, change in steps:
        held[index] = change
        found.append(UnitsChange(at_s, sum(c.prefill_units for c in held), sum(c.decode_units for c in held)))
    return found


def means(changes: Sequence[UnitsChange], begin_s: float, end_s: float, stretches: int) -> list[UnitsChange]:
    """Over time, of so many equal stretches. Both lanes rest before the first change."""
    width_s = (end_s - begin_s) / stretches
    found, held, coming = [], UnitsChange(begin_s, 0.0, 0.0), iter([*changes, UnitsChange(math.inf, 0.0, 0.0)])
    following = next(coming)
    for index in range(stretches):
        low_s = begin_s + index * width_s
        at_s, high_s, prefill, decode = low_s, low_s + width_s, 0.0, 0.0
        while at_s < high_s:
            until_s = min(max(following.at_s, at_s), high_s)
            prefill += (until_s - at_s) * held.prefill_units
            decode += (until_s - at_s) * held.decode_units
            at_s = until_s
            if following.at_s <= at_s < high_s:
                held, following = following, next(coming)
        found.append(UnitsChange(low_s, prefill / width_s, decode / width_s))
    return found
