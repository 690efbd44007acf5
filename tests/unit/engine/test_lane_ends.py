"""Two lanes: who leaves while a block is in flight, by whatever end, leaves nothing behind and nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.runner import GiveUp, StepBatch, StepOutput, never
from pdmux_ray.types import FinishReason, Split

from .lane_world import (
    assert_right,
    device,
    fixed,
    lanes_of,
    started,
)
from .test_schedules import drain
from .world import StrictRunner, Worlds, request


def test_who_is_aborted_during_a_block_is_told_at_once_and_keeps_its_pages_until_the_block_has_ended(worlds: Worlds) -> None:
    engine, log, clock = started(worlds)
    engine.abort(["long"])
    engine.step()
    assert log.finish("long") is FinishReason.ABORT
    held = 64 - engine.load().free_pages
    assert held == 2 + 5  # the reader's, and those that the device still writes
    while engine.load().free_pages < 62:
        engine.step()
        engine.check_integrity()
        assert clock.now() < 1.0
    engine.submit(again := request("again", [2] * 20, max_tokens=3))
    drain(engine)
    assert_right(log, engine, request("reader", max_tokens=40), again)


def test_a_deadline_that_passes_during_a_block_ends_its_request_and_no_other(worlds: Worlds) -> None:
    clock = VirtualClock()
    engine, log = worlds(fixed(1), runner=device, clock=clock)
    engine.submit(reader := request("reader", max_tokens=40))
    while not log.tokens("reader"):
        engine.step()
    engine.submit(replace(request("late", [2] * 30), deadline_s=clock.now() + 0.05))
    drain(engine)
    assert log.error("late")[0] == "DeadlineError"
    assert_right(log, engine, reader)


def test_a_job_goes_on_while_one_of_its_requests_is_wanted_and_the_pages_of_the_others_are_held_until_its_end(
    worlds: Worlds,
) -> None:
    engine, log = worlds(fixed(2, ttft_s=1.0), runner=device)
    stays = request("stays", [1] * 8, max_tokens=3)
    engine.submit(stays)
    engine.submit(request("goes", [2] * 8))
    engine.step()
    engine.abort(["goes"])
    engine.step()
    engine.check_integrity()
    assert [r.ttft_deadline_s for r in lanes_of(engine).jobs[0].requests] == [pytest.approx(1.0), math.inf]
    assert engine.load().free_pages == 64 - 4
    drain(engine)
    assert log.finish("goes") is FinishReason.ABORT
    assert_right(log, engine, stays)


class BlockFails(StrictRunner):
    """Every block fails, once it has computed."""

    def collect_block(self) -> StepOutput | None:
        assert self._blocks.in_flight
        self._blocks.clear()
        self._slices.clear()
        raise RuntimeError("illegal memory access")


class BlockFailsLate(StrictRunner):
    """Every block is collected before it has computed, and then fails."""

    @property
    def block_s(self) -> float:
        self._blocks.clear()
        self._slices.clear()
        raise RuntimeError("illegal memory access")


class SecondJobFails(StrictRunner):
    """To begin with."""

    def open_job(self, job_id: int, slices: Sequence[Any]) -> None:
        if job_id == 2:
            raise RuntimeError("out of memory")
        super().open_job(job_id, slices)


class DecodeFails(StrictRunner):
    """While a block is in flight."""

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if self._blocks.in_flight:
            raise RuntimeError("illegal instruction")
        super().launch(batch, give_up, split)


@pytest.mark.parametrize("kind", [BlockFails, BlockFailsLate])
def test_a_block_that_fails_ends_its_requests_alone(
    worlds: Worlds, caplog: pytest.LogCaptureFixture, kind: type[StrictRunner]
) -> None:
    clock = VirtualClock()
    runner = device(clock)
    engine, log = worlds(fixed(2), runner=lambda _: runner, clock=clock)
    engine.submit(reader := request("reader", max_tokens=20))
    while not log.tokens("reader"):
        engine.step()
    runner.__class__ = kind
    engine.submit(request("long", [2] * 20))
    drain(engine)
    assert log.error("long") == ("PdmuxError", "The device failed while it computed this request. Try again.")
    assert "illegal memory access" in caplog.text
    assert_right(log, engine, reader)
    assert engine.problem() is None


class SecondJobStops(StrictRunner):
    """Half way."""

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        if job_id == 2 and end_layer > 4:
            raise RuntimeError("out of memory")
        super().launch_block(job_id, end_layer, split)


@pytest.mark.parametrize("kind", [SecondJobFails, SecondJobStops])
def test_a_job_that_cannot_begin_or_go_on_ends_its_requests_alone(worlds: Worlds, kind: type[StrictRunner]) -> None:
    engine, log, _ = started(worlds, kind)
    drain(engine)
    assert log.finish("long") is FinishReason.ERROR
    assert_right(log, engine, request("reader", max_tokens=40))


def test_a_decode_that_fails_leaves_the_block_beside_it_alone(worlds: Worlds) -> None:
    engine, log, _ = started(worlds, DecodeFails)
    drain(engine)
    assert log.finish("reader") is FinishReason.ERROR
    assert_right(log, engine, request("long", [2] * 20, max_tokens=3))


def test_closing_waits_for_the_block_in_flight_and_ends_everyone_once(worlds: Worlds) -> None:
    engine, log, _ = started(worlds)
    engine.close()
    assert [log.finish(name) for name in ("reader", "long")] == [FinishReason.ERROR] * 2
    assert engine.load().free_pages == 64


def test_a_block_in_flight_that_nobody_waits_for_is_ended_and_the_engine_is_idle(worlds: Worlds) -> None:
    engine, log, _ = started(worlds)
    engine.abort(["reader", "long"])
    assert not engine.step()
    assert engine.load().free_pages == 64
    assert [log.finish(name) for name in ("reader", "long")] == [FinishReason.ABORT] * 2


def test_a_block_that_does_not_end_shows_as_the_age_of_the_step(worlds: Worlds) -> None:
    engine, _, clock = started(worlds)
    clock.sleep(31.0)
    assert engine.load().step_age_s > 31.0
    assert "31" in (engine.problem() or "")
    engine.abort(["long"])
