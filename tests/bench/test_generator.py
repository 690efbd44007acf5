"""How load is offered: on time, within its limits, and with an end that keeps what there is."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from pdmux_ray.bench import client_capacity
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import Load, OnProgress, Options, closed_loop, open_loop, run
from pdmux_ray.bench.scripted_server import Script, in_own_process
from pdmux_ray.bench.server import free_port
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.workload.requests import Ask, PlannedRequest
from tests.bench.repeated import repeated

pytestmark = pytest.mark.bench


def quiet(sent: int, done: int, planned: int) -> None: ...


def even(requests: int, gap_s: float, tokens: int = 4) -> list[PlannedRequest]:
    return [PlannedRequest(n, n * gap_s, Ask((n, 7), tokens)) for n in range(requests)]


def offered(
    script: Script, plan: Sequence[PlannedRequest], options: Options | None = None, on_progress: OnProgress = quiet
) -> Load:
    with in_own_process([script]) as server:
        return run(open_loop(Target(server.url, "m"), plan, options or Options(), on_progress))


def test_requests_are_sent_on_time_and_never_early() -> None:
    def on_time(load: Load) -> bool:
        assert min(late_s(load)) >= 0
        return load.invalid is None and statistics.median(late_s(load)) < 0.001

    load = repeated(lambda: offered(Script(first_s=1.0), even(100, 0.01)), on_time)
    assert statistics.median(late_s(load)) < 0.001
    assert load.invalid is None
    assert [line.due_s - load.start_s for line in load.lifelines] == pytest.approx([n * 0.01 for n in range(100)])


def late_s(load: Load) -> list[float]:
    return [line.sent_s - line.due_s for line in load.lifelines]


def test_what_is_not_done_by_the_drain_limit_is_unfinished() -> None:
    load = offered(Script(gap_s=0.05), [*even(4, 0.01), PlannedRequest(4, 0.05, Ask((4,), 10_000))], Options(drain_s=0.5))
    assert [line.ending for line in load.lifelines] == [Ending.COMPLETE] * 4 + [Ending.UNFINISHED]
    last = load.lifelines[-1]
    assert 5 <= len(last.token_s) <= 12
    assert last.token_s[-1] <= last.ended_s <= last.sent_s + 1


def test_nothing_is_sent_after_the_time_limit_and_that_is_told() -> None:
    load = offered(Script(), even(10, 0.1), Options(time_limit_s=0.45))
    assert len(load.lifelines) == 5
    assert load.notes == ["5 of 10 planned requests were not sent: the run was ended early."]


def test_ctrl_c_ends_with_what_there_is() -> None:
    interrupts: list[int] = []

    def interrupt(sent: int, done: int, planned: int) -> None:
        if sent >= 5 and not interrupts:
            interrupts.append(sent)
            os.kill(os.getpid(), signal.SIGINT)

    load = offered(Script(gap_s=0.05), even(1000, 0.1, tokens=100), on_progress=interrupt)
    assert load.interrupted
    assert 5 <= len(load.lifelines) < 20
    assert {line.ending for line in load.lifelines} == {Ending.UNFINISHED}
    assert all(line.ended_s >= line.sent_s for line in load.lifelines)


def test_a_client_that_stands_still_makes_its_run_invalid() -> None:
    def busy(sent: int, done: int, planned: int) -> None:
        time.sleep(0.1)

    load = offered(Script(), even(40, 0.025), on_progress=busy)
    assert "its loop stood still" in str(load.invalid)
    assert "sent late" in str(load.invalid)
    assert load.longest_stall_s >= 0.09


def test_progress_counts_what_was_sent_and_what_is_done() -> None:
    seen: list[tuple[int, int, int]] = []
    offered(Script(), even(20, 0.05), on_progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (20, 20, 20)
    assert len(seen) >= 4
    assert all(before <= after for before, after in pairwise(seen))


def test_a_closed_loop_keeps_so_many_under_way_and_the_next_is_due_when_one_ends() -> None:
    asks = [Ask((n,), 5) for n in range(12)]
    with in_own_process([Script(gap_s=0.02)]) as server:
        load = repeated(
            lambda: run(closed_loop(Target(server.url, "m"), asks, 3, Options(), quiet)), lambda load: load.invalid is None
        )
    lines = load.lifelines
    assert {line.ending for line in lines} == {Ending.COMPLETE}
    at_once = [sum(other.sent_s <= line.sent_s < other.ended_s for other in lines) for line in lines]
    assert max(at_once) == 3
    ends = sorted(line.ended_s for line in lines)
    assert [line.due_s for line in lines[3:]] == pytest.approx(ends[:9], abs=0.02)
    assert load.invalid is None


def test_a_closed_loop_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        run(closed_loop(Target("http://127.0.0.1:1", "m"), [], 0, Options(), quiet))


def test_a_server_that_is_not_there_is_no_run_at_all() -> None:
    with pytest.raises(PdmuxError, match="Cannot connect"):
        run(open_loop(Target(f"http://127.0.0.1:{free_port()}", "m"), even(1, 1.0), Options(), quiet))


def test_capacity_is_measured_and_what_is_beyond_it_is_said() -> None:
    cores = sorted(os.sched_getaffinity(0))
    easy = repeated(
        lambda: client_capacity.measure("steps", streams=20, tokens_per_s=200, seconds=1.0, cores=cores), lambda one: one.holds
    )
    assert easy.holds
    assert easy.received_per_s == pytest.approx(200, rel=0.02)
    assert easy.late_s[0] >= 0
    too_much = client_capacity.Outcome("steps", 400.0, easy.received_per_s, 1.0, easy.late_s, easy.load, lost=3)
    assert not too_much.holds
    assert [line.split()[-1] for line in client_capacity.table([easy, too_much])[1:3]] == ["ok", "CANNOT"]
    assert "3 requests" in client_capacity.table([too_much])[-1]
