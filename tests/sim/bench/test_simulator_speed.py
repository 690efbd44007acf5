"""The table of the simulator's speed: what it measures, and that its cases are what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import simulator_speed as speed
from pdmux_ray.types import Role

CONFIG = Path(__file__).parents[3] / speed.CONFIG
SAMPLE = Path(__file__).parents[3] / "configs" / "traces" / "mooncake_conversation_sample.jsonl"


def test_a_row_says_what_a_run_took_and_what_it_was_of() -> None:
    (case,) = speed.growth_cases([30])
    row = speed.measured(case, seed=0)
    cells = dict(zip(speed.HEADS, row.cells, strict=True))
    assert (row.requests, row.failed, cells["requests"]) == (30, 0, "30")
    assert row.steps >= 30
    assert row.events > 30
    assert row.simulated_s > 1.0
    assert speed.table([row])[2].startswith("| 30 short ones | 1 | 30 |")


def test_the_trace_comes_at_its_own_times_to_the_fleet_of_the_configuration() -> None:
    cases = speed.trace_cases(CONFIG, f"mooncake:{SAMPLE}", 5, "roofline", ("auto", "chunked"), one_by_one=True)
    assert [case.name for case in cases] == ["auto", "auto, step by step", "chunked", "chunked, step by step"]
    assert cases[0].config.roles == (Role.MUX,) * 8
    requests = list(speed.planned(cases[0], seed=0))
    assert len(requests) == 5
    assert [request.due_s for request in requests] == [request.ask.trace_s for request in requests]


def test_a_large_fleet_has_as_many_instances_as_are_asked_for() -> None:
    (case,) = speed.fleet_cases(1_000)
    assert len(case.config.roles) == 1_000


@pytest.mark.parametrize("wrong", [["--counts", "few"], ["--trace", "mooncake:nowhere.jsonl", "--only", "trace"]])
def test_a_wrong_argument_ends_it_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.main(wrong) == 2
    assert "simulator_speed" in capsys.readouterr().err
