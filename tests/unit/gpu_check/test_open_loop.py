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


def offer(
    planned: Sequence[tuple[float, int]],
    seconds: float = math.inf,
    prefill_s_per_token: float = 0.0,
    most_misses: float = math.inf,
    slo: Slo = SLO,
) -> Offered:
    """`planned`: when each request is due, and its output tokens."""
    clock = VirtualClock()
    runner = FakeRunner(64, 4, STEP_S, prefill_s_per_token, clock, vocab_size=100)
    limits = Settings(max_batch=8).limits(64, 100)
    requests = [PlannedRequest(i, due_s, Ask((1, 2, 3), tokens)) for i, (due_s, tokens) in enumerate(planned)]
    return OpenLoop(lambda publish: Engine(runner, limits, publish, clock), clock, slo).run(requests, seconds, most_misses)


def test_a_request_is_sent_when_it_is_due_and_answered_a_step_later() -> None:
    line, _ = offer([(0.5, 4), (0.9, 1)]).lifelines
    assert line.due_s == 0.5
    assert line.sent_s - line.due_s == pytest.approx(0.0, abs=0.0011)  # an idle engine looks every millisecond
    assert line.ttft_s == pytest.approx(STEP_S, abs=0.0011)
    assert line.gaps_s == pytest.approx([STEP_S] * 3)
    assert SLO.verdict(line) is Verdict.GOOD


def test_a_busy_engine_takes_requests_between_two_steps_and_their_wait_counts() -> None:
    first, second = offer([(0.0, 100), (0.015, 2)]).lifelines
    assert first.ending is Ending.COMPLETE
    assert second.sent_s == pytest.approx(0.02)
    assert second.ttft_s == pytest.approx(0.015)  # from 0.015: the end of a step, and one more


def test_whom_the_end_cuts_off_is_judged_by_what_it_had() -> None:
    line, _ = offer([(0.0, 1000), (0.2, 1)]).lifelines
    assert line.ending is Ending.COMPLETE
    assert len(line.token_s) == pytest.approx(21, abs=1)
    assert SLO.verdict(line) is Verdict.GOOD


def test_a_run_lasts_until_nobody_may_still_have_a_first_token_in_time() -> None:
    queued = offer([(0.0, 1000)] * 10)  # 8 run at once, for 10 s
    assert (queued.open, queued.decided) == (0, True)
    assert [SLO.verdict(line) for line in queued.lifelines] == [Verdict.GOOD] * 8 + [Verdict.UNFINISHED] * 2
    assert max(line.ended_s for line in queued.lifelines) == pytest.approx(0.1, abs=2 * STEP_S)
    soon = offer([(0.0, 5)] * 10)
    assert [SLO.verdict(line) for line in soon.lifelines] == [Verdict.GOOD] * 10


def test_a_first_token_that_comes_late_is_a_miss() -> None:
    late = offer([(0.0, 5)], prefill_s_per_token=0.04)  # its prefill ends at 0.13: after the objective
    assert [SLO.verdict(line) for line in late.lifelines] == [Verdict.TTFT]


def test_a_run_that_is_ended_before_its_time_has_not_decided_and_says_how_many_are_open() -> None:
    cut = offer([(0.0, 1000)] * 10 + [(0.9, 2)], seconds=0.025)
    assert (cut.open, cut.decided) == (3, False)  # two that wait, and one that was not due
    assert [SLO.verdict(line) for line in cut.lifelines] == [Verdict.GOOD] * 8


def test_a_run_ends_when_more_have_missed_than_may() -> None:
    planned = [(0.1 * index, 2) for index in range(10)]
    slow = Slo(ttft_s=0.1, itl_s=STEP_S / 2)
    ended = offer(planned, most_misses=2, slo=slow)
    assert (ended.missed, ended.decided) == (True, True)
    assert [slow.verdict(line) for line in ended.lifelines] == [Verdict.ITL] * 3
    assert ended.open == 7
    assert not offer(planned, most_misses=10, slo=slow).missed


def test_times_are_those_of_the_clock_from_the_run_on() -> None:
    (line,) = offer([(0.0, 2)]).lifelines
    assert not math.isnan(line.ended_s)
    assert line.prompt_tokens == 3
