"""The open loop on a fake device and a virtual clock: who is submitted when, and who is judged by what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.gpu_check.open_loop import Offered, OpenLoop
from pdmux_ray.gpu_check.settings import Settings
from pdmux_ray.metrics.goodput import Slo, Verdict
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.workload.requests import Ask, PlannedRequest

STEP_S = 0.01
SLO = Slo(ttft_s=0.1, itl_s=0.02)


def offer(planned: Sequence[tuple[float, int]], seconds: float, prefill_s_per_token: float = 0.0) -> Offered:
    """`planned`: when each request is due, and its output tokens."""
    clock = VirtualClock()
    runner = FakeRunner(64, 4, STEP_S, prefill_s_per_token, clock, vocab_size=100)
    limits = Settings(max_batch=8).limits(64, 100)
    requests = [PlannedRequest(i, due_s, Ask((1, 2, 3), tokens)) for i, (due_s, tokens) in enumerate(planned)]
    return OpenLoop(lambda publish: Engine(runner, limits, publish, clock), clock).run(requests, seconds, SLO)


def test_a_request_is_sent_when_it_is_due_and_answered_a_step_later() -> None:
    (line,) = offer([(0.5, 4)], 1.0).lifelines
    assert line.due_s == 0.5
    assert line.sent_s - line.due_s == pytest.approx(0.0, abs=0.0011)  # an idle engine looks every millisecond
    assert line.ttft_s == pytest.approx(STEP_S, abs=0.0011)
    assert line.gaps_s == pytest.approx([STEP_S] * 3)
    assert SLO.verdict(line) is Verdict.GOOD


def test_a_busy_engine_takes_requests_between_two_steps_and_their_wait_counts() -> None:
    first, second = offer([(0.0, 100), (0.015, 2)], 0.5).lifelines
    assert first.ending is Ending.COMPLETE
    assert second.sent_s == pytest.approx(0.02)
    assert second.ttft_s == pytest.approx(0.015)  # from 0.015: the end of a step, and one more


def test_whom_the_end_cuts_off_is_judged_by_what_it_had() -> None:
    (line,) = offer([(0.0, 1000)], 0.2).lifelines
    assert line.ending is Ending.COMPLETE
    assert len(line.token_s) == pytest.approx(20, abs=1)
    assert SLO.verdict(line) is Verdict.GOOD


def test_a_first_token_that_is_late_at_the_end_is_a_miss_and_one_that_is_not_due_yet_is_none() -> None:
    late = offer([(0.0, 5)], 0.15, prefill_s_per_token=0.04)  # its prefill ends at 0.13: after the objective, before the end
    assert [SLO.verdict(line) for line in late.lifelines] == [Verdict.TTFT]
    queued = offer([(0.0, 30)] * 10, 0.025)  # 8 run at once
    assert queued.open == 2
    assert [SLO.verdict(line) for line in queued.lifelines] == [Verdict.GOOD] * 8


def test_what_is_due_after_the_end_is_not_sent() -> None:
    assert len(offer([(0.0, 2), (0.9, 2)], 0.5).lifelines) == 1


def test_times_are_those_of_the_clock_from_the_run_on() -> None:
    (line,) = offer([(0.0, 2)], 0.5).lifelines
    assert not math.isnan(line.ended_s)
    assert line.prompt_tokens == 3
