"""Timelines of engines as one trace in Chrome's format, which https://ui.perfetto.dev opens; and what pictures need, read back.

A process for each instance, with three tracks: its prefill lane, its decode lane (slices named by mode, split and layers) and
its requests (arrivals and ends). Counters: units a lane, the decode batch, those who wait, predicted and measured times.

Pure. Times within a trace are microseconds, as the format has it; every other time here is in seconds. All are on one monotonic
clock, which `otherData` names together with its reading when the trace was made (`now_s`): that aligns any other clock with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pdmux_ray.engine.timeline import Arrival, Ended, PrefillBlock, Record, Step
from pdmux_ray.metrics.lane_units import UnitsChange, units_changes
from pdmux_ray.types import ONE_PASS_MODES, Split

CLOCK = "CLOCK_MONOTONIC"

PREFILL, DECODE, REQUESTS = 1, 2, 3  # the tracks
KINDS = ("decode", "block", "pass")  # of work: a step's decodes, a block of a prefill's layers, or both in one pass
_ONE_PASS = frozenset(mode.value for mode in ONE_PASS_MODES)
_PREDICTED, _BOUND = "predicted ms", "99 % bound ms"  # arguments of a slice
_SPLIT = re.compile(r" (\d+)/(\d+)(?: |$)")  # in the name of a slice
_TRACKS = {PREFILL: "prefill lane", DECODE: "decode lane", REQUESTS: "requests"}

Trace: TypeAlias = dict[str, Any]
Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One instance's timeline. `offset_s` is added to its times to have the trace's clock. `lessons`: what its steps have
    taught, as `latency.correction.Lesson` has it."""

    instance: str
    units: int
    records: Sequence[Record]
    offset_s: float = 0.0
    lessons: Sequence[Sequence[Any]] = ()


def clock_offset_s(before_s: float, theirs_s: float, after_s: float) -> float:
    """What to add to another clock, which was read between two readings of ours. 0 when it can be the same clock."""
    return 0.0 if before_s <= theirs_s <= after_s else (before_s + after_s) / 2 - theirs_s


def chrome_trace(sources: Sequence[Source], now_s: float, missing: Mapping[str, str] | None = None) -> Trace:
    """`now_s`: the trace's clock now. `missing`: instance -> why it has nothing in the trace."""
    events = [event for pid, source in enumerate(sources, 1) for event in _events(pid, source)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": CLOCK,
            "now_s": now_s,
            "instances": {source.instance: _about(pid, source) for pid, source in enumerate(sources, 1)},
            "missing": dict(missing or {}),
        },
    }


def _about(pid: int, source: Source) -> dict[str, Any]:
    return {"pid": pid, "units": source.units, **({"lessons": source.lessons} if source.lessons else {})}


def _events(pid: int, source: Source) -> Iterable[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"instance {source.instance}"}}
    for tid, name in _TRACKS.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    shown: dict[str, Mapping[str, float]] = {}
    for record in source.records:
        for event in _of_record(record):
            if event["ph"] == "C" and shown.get(event["name"]) == event["args"]:
                continue  # a counter holds until it changes
            if event["ph"] == "C":
                shown[event["name"]] = event["args"]
            yield {"pid": pid, **event, "ts": _us(event["ts"] + source.offset_s)}
    for change in units_changes(source.records):
        args = {"prefill": change.prefill_units, "decode": change.decode_units}
        yield {"pid": pid, "ph": "C", "name": "units", "ts": _us(change.at_s + source.offset_s), "args": args}


def _of_record(record: Record) -> list[Event]:
    """With `ts` in seconds on the instance's clock."""
    match record:
        case Arrival():
            args = {"request": record.request_id, "prompt tokens": record.prompt_tokens}
            return [_instant(record.at_s, "arrival", args)]
        case Ended():
            args = {"request": record.request_id, "reason": record.how, "generated tokens": record.generated_tokens}
            return [_instant(record.at_s, "end", args)]
        case PrefillBlock():
            return _of_block(record)
    return _of_step(record)


def _of_step(step: Step) -> list[Event]:
    split = "" if step.mode in _ONE_PASS else f" {step.prefill_units}/{step.decode_units}"
    args = {
        "reason": step.reason,
        **({"why": step.why} if step.why else {}),
        **({"burst": f"{step.steps} steps: {step.burst}"} if step.burst else {}),
        **({"may wait ms": _ms(step.wait_s)} if step.wait_s else {}),
        "decodes": step.decodes,
        "waiting": step.waiting,
        **({"prefill tokens": step.prefill_tokens} if step.prefill_tokens else {}),
        **_predicted(step),
    }
    found = []
    if step.prefill_tokens:
        found.append(_slice(PREFILL, step, f"{step.mode} {step.prefill_tokens} tokens", args))
    if step.decodes:
        found.append(_slice(DECODE, step, f"{step.mode}{split} decode {step.decodes}", args))
    found.append(_counter(step.begin_s, "decode batch", {"requests": step.decodes}))
    found.append(_counter(step.begin_s, "waiting", {"requests": step.waiting}))
    return [*found, *_times("decode ms", step)]


def _of_block(block: PrefillBlock) -> list[Event]:
    layers = f"layers {block.first_layer}-{block.end_layer}"
    args = {"why": block.why, "job": block.job_id, "tokens": block.tokens, **_predicted(block)}
    name = f"{block.mode} {block.prefill_units}/{block.decode_units} {layers}"
    return [_slice(PREFILL, block, name, args), *_times("block ms", block)]


def _predicted(record: Step | PrefillBlock) -> dict[str, float]:
    """Beside the slice's own length, which is what was measured."""
    if record.predicted_s is None or record.bound_s is None:
        return {}
    return {_PREDICTED: _ms(record.predicted_s), _BOUND: _ms(record.bound_s)}


def _times(name: str, record: Step | PrefillBlock) -> list[Event]:
    if record.predicted_s is None:
        return []
    values = {"predicted": _ms(record.predicted_s), "measured": _ms(record.end_s - record.begin_s)}
    return [_counter(record.begin_s, name, values)]


def _slice(tid: int, record: Step | PrefillBlock, name: str, args: Mapping[str, Any]) -> Event:
    length_us = round(_us(record.end_s) - _us(record.begin_s), 1)
    return {"ph": "X", "tid": tid, "ts": record.begin_s, "dur": length_us, "name": name, "cat": record.mode, "args": args}


def _counter(at_s: float, name: str, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "ts": at_s, "name": name, "args": values}


def _instant(at_s: float, name: str, args: Mapping[str, Any]) -> Event:
    return {"ph": "i", "tid": REQUESTS, "s": "t", "ts": at_s, "name": name, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def events_of(trace: Trace, instance: str, phase: str, name: str | None = None) -> list[Event]:
    """Read back: an instance's events of a phase ("X" slices, "C" counters, "i" instants), of one name or of any."""
    pid = trace["otherData"]["instances"][instance]["pid"]
    return [e for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == phase and name in (None, e["name"])]


class Slice(NamedTuple):
    """What a lane did at a time, read back. Seconds, on the trace's clock."""

    lane: int  # PREFILL or DECODE
    kind: str  # of KINDS
    mode: str
    why: str  # of the mode; of the step where there was no choice
    begin_s: float
    took_s: float
    predicted_s: float | None  # None: nothing was predicted
    bound_s: float | None
    counted: bool  # False for one of the two of a pass that prefills and decodes: it is on both lanes
    split: Split | None  # None: a step without lanes
    decodes: int  # requests; of a block, whatever runs beside it, 0


def slices_of(trace: Trace, instance: str) -> list[Slice]:
    """Raises KeyError when something is missing in it."""
    return [_read_back(event) for event in events_of(trace, instance, "X")]


def _read_back(event: Event) -> Slice:
    args, lane = event["args"], event["tid"]
    kind = "block" if "job" in args else "pass" if lane == PREFILL or "prefill tokens" in args else "decode"
    why = args.get("why") or args["reason"]
    predicted_s, bound_s = (args[name] / 1e3 if name in args else None for name in (_PREDICTED, _BOUND))
    counted = kind != "pass" or lane == DECODE or not args["decodes"]
    named = _SPLIT.search(event["name"])
    split = Split(int(named[1]), int(named[2])) if named else None
    begin_s, took_s, decodes = event["ts"] / 1e6, event["dur"] / 1e6, args.get("decodes", 0)
    return Slice(lane, kind, event["cat"], why, begin_s, took_s, predicted_s, bound_s, counted, split, decodes)


def units_of(trace: Trace, instance: str) -> list[UnitsChange]:
    """Read back, on the trace's clock."""
    counters = events_of(trace, instance, "C", "units")
    return [UnitsChange(event["ts"] / 1e6, event["args"]["prefill"], event["args"]["decode"]) for event in counters]


def arrivals_of(trace: Trace, instance: str) -> list[tuple[float, int]]:
    """(when, prompt tokens), read back."""
    return [(event["ts"] / 1e6, event["args"]["prompt tokens"]) for event in events_of(trace, instance, "i", "arrival")]
