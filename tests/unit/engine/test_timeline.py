"""The ring of what the step loop did lately."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from pdmux_ray.engine.timeline import Arrival, Ended, PrefillBlock, Step, Timeline, unpack
from pdmux_ray.policy.decisions import Block, BurstReason, Chunk, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import FinishReason, Mode, Split

BLOCK = Block(3, (), 12)
SHARED = LaneUse(Mode.SPLIT, Split(3, 1), ModeReason.FITS, BLOCK, Estimate(0.02, 0.025), Estimate(0.05, 0.06))


def timeline(mode: Mode = Mode.SPLIT, kept: int = 8) -> Timeline:
    return Timeline(units=4, mode=mode, kept=kept)


def test_a_step_on_lanes_is_kept_with_its_split_its_reasons_and_what_was_predicted() -> None:
    ring = timeline()
    ring.step(StepPlan(StepReason.LANES_BOTH, ("a", "b"), lanes=SHARED), 1.0, 1.5, waiting=7)
    assert ring.since(0) == [Step("step", 0, 1.0, 1.5, "lanes_both", "split", "fits", 3, 1, 2, 0, 7, 0.02, 0.025)]


def test_a_step_is_kept_with_how_long_it_might_wait_for_a_block() -> None:
    ring = timeline()
    ring.step(StepPlan(StepReason.LANES_BOTH, ("a",), lanes=replace(SHARED, wait_s=0.004)), 1.0, 1.5, waiting=0)
    (record,) = ring.since(0)
    assert isinstance(record, Step)
    assert record.wait_s == 0.004
    assert unpack(json.loads(json.dumps(record))) == record


def test_a_block_is_kept_with_its_layers_and_what_was_predicted() -> None:
    ring = timeline()
    ring.block(SHARED, job_id=3, first_layer=5, tokens=700, begin_s=2.0, end_s=2.25)
    assert ring.since(0) == [PrefillBlock("block", 0, 2.0, 2.25, "split", "fits", 3, 1, 3, 5, 12, 700, 0.05, 0.06)]


@pytest.mark.parametrize(
    ("configured", "had"),
    [(Mode.PREFILL_FIRST, "prefill_first"), (Mode.CHUNKED, "chunked"), (Mode.AUTO, "chunked")],
)
def test_a_step_without_lanes_has_all_units_and_the_configured_mode(configured: Mode, had: str) -> None:
    ring = timeline(configured)
    plan = StepPlan(StepReason.CHUNK_MIXED, ("a",), (Chunk("b", 0, 40), Chunk("c", 8, 2)))
    ring.step(plan, 1.0, 1.5, waiting=0)
    assert ring.since(0) == [Step("step", 0, 1.0, 1.5, "chunk_mixed", had, None, 4, 4, 1, 42, 0, None, None)]


def test_a_pass_that_auto_chose_is_kept_with_its_reason() -> None:
    ring = timeline(Mode.AUTO)
    plan = StepPlan(StepReason.CHUNK_ONLY, prefill=(Chunk("b", 0, 40),), why=ModeReason.SLACK, step_s=Estimate(0.4, 0.6))
    ring.step(plan, 1.0, 1.5, waiting=0)
    assert ring.since(0) == [Step("step", 0, 1.0, 1.5, "chunk_only", "chunked", "slack", 4, 4, 0, 40, 0, 0.4, 0.6)]


def test_a_step_of_a_burst_is_kept_with_how_many_they_were_and_why() -> None:
    ring = timeline()
    ring.step(StepPlan(StepReason.DECODE_ONLY, ("a",), steps=4, burst=BurstReason.FULL), 1.0, 1.5, waiting=0)
    (record,) = ring.since(0)
    assert isinstance(record, Step)
    assert (record.steps, record.burst) == (4, "full")
    assert unpack(json.loads(json.dumps(record))) == record


def test_arrivals_and_ends_are_marks_among_the_steps() -> None:
    ring = timeline()
    ring.arrived(1.0, "a", 12)
    ring.ended(2.0, "a", FinishReason.LENGTH.value, 5)
    assert ring.since(0) == [Arrival("arrival", 0, 1.0, "a", 12), Ended("ended", 1, 2.0, "a", "length", 5)]


def test_only_the_newest_records_are_kept_and_they_keep_their_numbers() -> None:
    ring = timeline(kept=3)
    for at in range(10):
        ring.arrived(float(at), f"r{at}", 1)
    assert [record.number for record in ring.since(0)] == [7, 8, 9]
    assert [record.number for record in ring.since(8)] == [8, 9]
    assert [record.number for record in ring.since(0, most=2)] == [7, 8]
    assert ring.since(10) == []
    assert [record.number for record in ring.since(0, begin_s=8.5)] == [9]
    assert [record.number for record in ring.since(9, begin_s=1.0)] == [9]


def test_a_record_survives_json() -> None:
    ring = timeline()
    ring.arrived(1.0, "a", 12)
    ring.step(StepPlan(StepReason.LANES_BOTH, ("a",), lanes=SHARED), 1.0, 1.5, waiting=0)
    ring.block(SHARED, 3, 5, 700, 2.0, 2.25)
    ring.ended(2.0, "a", FinishReason.STOP.value, 5)
    records = ring.since(0)
    assert [unpack(packed) for packed in json.loads(json.dumps(records))] == records


def test_another_thread_may_read_while_the_loop_adds() -> None:
    ring = timeline(kept=64)
    done = threading.Event()
    breaks: list[int] = []

    def read() -> None:
        while not done.is_set():
            numbers = [record.number for record in ring.since(0)]
            breaks.extend(a for a, b in pairwise(numbers) if b != a + 1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        ring.arrived(0.0, "a", 1)
    done.set()
    reader.join()
    assert breaks == []
