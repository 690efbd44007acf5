"""Timelines as a trace: what its tracks show, and what pictures read back from it."""

from __future__ import annotations

import json

import pytest

from pdmux_ray.engine.timeline import Arrival, Ended, Record
from pdmux_ray.metrics.lane_units import UnitsChange
from pdmux_ray.metrics.trace import (
    DECODE,
    PREFILL,
    REQUESTS,
    Event,
    Source,
    Trace,
    arrivals_of,
    chrome_trace,
    clock_offset_s,
    events_of,
    slices_of,
    units_of,
)
from pdmux_ray.types import Split

from .records import UNITS, block, one_pass, step


def arrival(at_s: float, tokens: int) -> Arrival:
    return Arrival("arrival", 0, at_s, "r", tokens)


def trace_of(*records: Record, offset_s: float = 0.0) -> Trace:
    trace: Trace = json.loads(json.dumps(chrome_trace([Source("one", UNITS, records, offset_s)], 99.0)))
    return trace


def events(trace: Trace, phase: str, name: str | None = None) -> list[Event]:
    return events_of(trace, "one", phase, name)


def test_a_step_is_a_slice_of_the_decode_lane_with_its_reason_and_what_was_predicted() -> None:
    (slice_,) = events(trace_of(step(1.0, 1.02)), "X")
    assert (slice_["tid"], slice_["ts"], slice_["dur"], slice_["name"]) == (DECODE, 1e6, 20_000, "split 3/1 decode 2")
    assert slice_["args"] == {
        "reason": "lanes_both",
        "why": "fits",
        "decodes": 2,
        "waiting": 0,
        "predicted ms": 19,
        "99 % bound ms": 22.1,
    }


def test_a_step_of_a_burst_says_how_many_they_were_and_why() -> None:
    (alone,) = events(trace_of(step(1.0, 1.02)), "X")
    (shown,) = events(trace_of(step(1.0, 1.02)._replace(steps=3, burst="ends")), "X")
    assert "burst" not in alone["args"]
    assert shown["args"]["burst"] == "3 steps: ends"


def test_a_step_whose_successor_might_wait_for_a_block_says_how_long() -> None:
    (alone,) = events(trace_of(step(1.0, 1.02)), "X")
    (shown,) = events(trace_of(step(1.0, 1.02)._replace(wait_s=0.004)), "X")
    assert "may wait ms" not in alone["args"]
    assert shown["args"]["may wait ms"] == 4


def test_a_block_is_a_slice_of_the_prefill_lane_with_its_layers() -> None:
    (slice_,) = events(trace_of(block(1.0, 1.5)), "X")
    assert (slice_["tid"], slice_["dur"], slice_["name"]) == (PREFILL, 500_000, "split 3/1 layers 5-12")
    assert slice_["args"] == {"why": "slack", "job": 7, "tokens": 700}


def test_a_pass_that_does_both_is_on_both_lanes() -> None:
    names = {slice_["tid"]: slice_["name"] for slice_ in events(trace_of(one_pass(1.0, 1.5, 3, 40)), "X")}
    assert names == {PREFILL: "chunked 40 tokens", DECODE: "chunked decode 3"}


def test_what_the_lanes_did_is_read_back_and_a_pass_on_both_counts_once() -> None:
    trace = trace_of(step(1.0, 1.02), block(2.0, 2.5), one_pass(3.0, 3.5, 3, 40), one_pass(4.0, 4.5, 0, 40))
    slices = slices_of(trace, "one")
    assert [(found.lane, found.kind, found.mode, found.counted) for found in slices] == [
        (DECODE, "decode", "split", True),
        (PREFILL, "block", "split", True),
        (PREFILL, "pass", "chunked", False),
        (DECODE, "pass", "chunked", True),
        (PREFILL, "pass", "chunked", True),
    ]
    assert [found.why for found in slices] == ["fits", "slack", "chunk_mixed", "chunk_mixed", "chunk_mixed"]
    assert slices[0][4:8] == pytest.approx((1.0, 0.02, 0.019, 0.0221))
    assert slices[1][4:8] == (2.0, 0.5, None, None)
    assert [found.decodes for found in slices] == [2, 0, 3, 3, 0]
    assert [found.split for found in slices] == [Split(3, 1), Split(3, 1), None, None, None]


def test_arrivals_and_ends_are_instants_beside_the_lanes() -> None:
    trace = trace_of(arrival(1.0, 12), Ended("ended", 1, 2.0, "r", "length", 5))
    first, last = events(trace, "i")
    assert (first["tid"], first["name"], first["args"]) == (REQUESTS, "arrival", {"request": "r", "prompt tokens": 12})
    assert (last["ts"], last["args"]["reason"]) == (2e6, "length")


def test_predicted_and_measured_times_are_one_counter() -> None:
    (counter,) = events(trace_of(step(1.0, 1.02)), "C", "decode ms")
    assert counter["args"] == {"predicted": 19, "measured": 20}


def test_a_counter_is_written_when_it_changes() -> None:
    trace = trace_of(step(1.0, 1.02), step(1.02, 1.04), step(1.04, 1.06, decodes=3))
    assert [counter["args"]["requests"] for counter in events(trace, "C", "decode batch")] == [2, 3]


def test_the_trace_says_its_clock_what_it_shows_now_and_who_is_in_it() -> None:
    told = chrome_trace([Source("one", 4, []), Source("two", 132, [])], 7.5, {"three": "it hangs"})["otherData"]
    assert told == {
        "clock": "CLOCK_MONOTONIC",
        "now_s": 7.5,
        "instances": {"one": {"pid": 1, "units": 4}, "two": {"pid": 2, "units": 132}},
        "missing": {"three": "it hangs"},
    }


def test_each_instance_is_a_process_of_its_own() -> None:
    trace = chrome_trace([Source("one", 4, [arrival(1.0, 5)]), Source("two", 4, [arrival(2.0, 6)])], 9.0)
    assert (arrivals_of(trace, "one"), arrivals_of(trace, "two")) == ([(1.0, 5)], [(2.0, 6)])


def test_an_offset_moves_everything() -> None:
    trace = trace_of(arrival(1.0, 5), step(1.0, 1.5), offset_s=100.0)
    assert arrivals_of(trace, "one") == [(101.0, 5)]
    assert units_of(trace, "one") == [UnitsChange(101.0, 0, 1), UnitsChange(101.5, 0, 0)]
    assert {slice_["ts"] for slice_ in events(trace, "X")} == {101e6}


def test_a_clock_whose_reading_lies_between_ours_is_ours() -> None:
    assert clock_offset_s(10.0, 10.4, 11.0) == 0.0
    assert clock_offset_s(10.0, 3.0, 11.0) == 7.5
