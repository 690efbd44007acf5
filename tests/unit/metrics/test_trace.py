"""Timelines as a trace: what its tracks show, and what pictures read back from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.engine.timeline import Arrival, Ended, PrefillBlock, Record, Step
from pdmux_ray.metrics.trace import (
    BRIDGE_S,
    DECODE,
    PREFILL,
    REQUESTS,
    Event,
    Source,
    Trace,
    UnitsChange,
    arrivals_of,
    chrome_trace,
    clock_offset_s,
    events_of,
    means,
    together,
    units_changes,
    units_of,
)

UNITS = 4


def step(begin_s: float, end_s: float, *, decodes: int = 2, decode_units: int = 1, waiting: int = 0) -> Step:
    """Of a split; predicted."""
    return Step("step", 0, begin_s, end_s, "lanes_both", "split", "fits", 3, decode_units, decodes, 0, waiting, 0.019, 0.0221)


def one_pass(begin_s: float, end_s: float, decodes: int, prefill_tokens: int) -> Step:
    return Step("step", 0, begin_s, end_s, "chunk_mixed", "chunked", None, UNITS, UNITS, decodes, prefill_tokens, 0, None, None)


def block(begin_s: float, end_s: float, units: int = 3) -> PrefillBlock:
    return PrefillBlock("block", 0, begin_s, end_s, "split", "slack", units, 1, 7, 5, 12, 700, None, None)


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


def test_a_block_is_a_slice_of_the_prefill_lane_with_its_layers() -> None:
    (slice_,) = events(trace_of(block(1.0, 1.5)), "X")
    assert (slice_["tid"], slice_["dur"], slice_["name"]) == (PREFILL, 500_000, "split 3/1 layers 5-12")
    assert slice_["args"] == {"why": "slack", "job": 7, "tokens": 700}


def test_a_pass_that_does_both_is_on_both_lanes() -> None:
    names = {slice_["tid"]: slice_["name"] for slice_ in events(trace_of(one_pass(1.0, 1.5, 3, 40)), "X")}
    assert names == {PREFILL: "chunked 40 tokens", DECODE: "chunked decode 3"}


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


def test_units_of_lanes_follow_their_blocks_and_steps() -> None:
    records = [step(0.0, 1.0, decode_units=4), block(1.0, 4.0), step(1.0, 2.0), step(2.0, 3.0), step(3.0, 4.0)]
    assert units_changes(records) == [UnitsChange(0.0, 0, 4), UnitsChange(1.0, 3, 1), UnitsChange(4.0, 0, 0)]


def test_a_lane_that_waits_for_the_host_alone_keeps_its_units_and_one_that_rests_has_none() -> None:
    short, long = 1.0 + BRIDGE_S / 2, 2.0 + 2 * BRIDGE_S
    assert units_changes([step(0.0, 1.0), step(short, 2.0), step(long, 3.0)]) == [
        UnitsChange(0.0, 0, 1),
        UnitsChange(2.0, 0, 0),
        UnitsChange(long, 0, 1),
        UnitsChange(3.0, 0, 0),
    ]


def test_one_pass_shares_the_device_by_tokens() -> None:
    records = [one_pass(0.0, 1.0, 0, 9), one_pass(1.0, 2.0, 3, 9), one_pass(2.0, 3.0, 5, 0)]
    assert units_changes(records) == [
        UnitsChange(0.0, 4, 0),
        UnitsChange(1.0, 3, 1),
        UnitsChange(2.0, 0, 4),
        UnitsChange(3.0, 0, 0),
    ]


def test_a_step_without_decodes_leaves_their_lane_at_rest() -> None:
    assert units_changes([step(0.0, 1.0, decodes=0)]) == []


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4), st.integers(0, 4)), max_size=20),
    st.integers(1, 30),
)
def test_means_keep_the_units_seconds_of_each_lane(changes: list[tuple[float, int, int]], stretches: int) -> None:
    ordered = [UnitsChange(*change) for change in sorted(changes)]
    found = means(ordered, 2.0, 8.0, stretches)
    assert len(found) == stretches
    ends = [*(change.at_s for change in ordered[1:]), 8.0]
    for lane in (1, 2):
        exact = sum(
            max(0.0, min(end, 8.0) - max(change.at_s, 2.0)) * change[lane] for change, end in zip(ordered, ends, strict=False)
        )
        assert sum(mean[lane] for mean in found) * 6.0 / stretches == pytest.approx(exact, abs=1e-6)


def test_the_units_of_several_instances_add_up() -> None:
    one = [UnitsChange(0.0, 3, 1), UnitsChange(2.0, 0, 4)]
    assert together([one, [UnitsChange(1.0, 4, 0)]]) == [
        UnitsChange(0.0, 3, 1),
        UnitsChange(1.0, 7, 1),
        UnitsChange(2.0, 4, 4),
    ]
    assert together([one]) == one


def test_a_clock_whose_reading_lies_between_ours_is_ours() -> None:
    assert clock_offset_s(10.0, 10.4, 11.0) == 0.0
    assert clock_offset_s(10.0, 3.0, 11.0) == 7.5
