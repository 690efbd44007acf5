from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.session import REQUESTS_FILE, UNITS_FILE, RunRecord, Session, from_first_arrival, read_requests
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.report.series import UnitsSample
from tests.unit.metrics.lifelines import served

TERMS = Terms(Slo(ttft_s=0.5, itl_s=0.2))


def slow(due_s: float) -> Lifeline:
    return served(due_s + 0.9, due_s + 1.0, due_s=due_s)


def fast(due_s: float) -> Lifeline:
    return served(due_s + 0.1, (due_s + 0.2, 3), due_s=due_s)


def session_of(directory: Path, *records: RunRecord) -> Session:
    session = Session("a", directory, TERMS, {"seed": "0", "load": "open loop, poisson arrivals"})
    for record in records:
        session.add(record)
    return session


def test_what_is_written_is_read_back_whole(tmp_path: Path) -> None:
    failed = Lifeline(1.0, 1.000002, ending=Ending.ERROR, error='HTTP 500: "no"\n', asked_tokens=4)
    session = session_of(tmp_path, RunRecord(1.0, [fast(0.0), failed]), RunRecord(2.0, [slow(0.0)], "interrupted"))
    session.note("said once")
    session.note("said once")
    written = session.write()
    read = Session.read("a", tmp_path)
    assert read.summary() == written
    assert read.notes == ["said once"]
    assert [r.lifelines[0].token_s for r in read.records] == [r.lifelines[0].token_s for r in session.records]
    assert read.records[0].lifelines[1].error == failed.error
    assert read.records[0].lifelines[1].ended_s != read.records[0].lifelines[1].ended_s  # NaN: it is not known


def test_the_files_are_there_after_every_run(tmp_path: Path) -> None:
    session = session_of(tmp_path, RunRecord(1.0, [fast(0.0)]))
    assert len(summaries.read(tmp_path).runs) == 1
    session.add(RunRecord(2.0, [fast(0.0), fast(1.0)]))
    assert len(summaries.read(tmp_path).runs) == 2
    assert [len(run) for run in read_requests(tmp_path, 2)] == [1, 2]


def test_units_of_lanes_are_kept_beside_the_runs_they_belong_to(tmp_path: Path) -> None:
    session = session_of(tmp_path, RunRecord(1.0, [fast(0.0)]))
    session.add_units([UnitsSample(0.5, 3, 1, 0), UnitsSample(0.7, 0, 4, 0)])
    assert Session.read("a", tmp_path).units == [UnitsSample(0.5, 3, 1, 0), UnitsSample(0.7, 0, 4, 0)]
    (tmp_path / UNITS_FILE).write_text('{"time_s": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is no sample of units"):
        Session.read("a", tmp_path)


def test_rounds_at_one_rate_are_one_point_each_round_in_its_own_order(tmp_path: Path) -> None:
    session = session_of(
        tmp_path, RunRecord(1.0, [fast(0.0), slow(1.0)]), RunRecord(2.0, [slow(0.0)]), RunRecord(1.0, [slow(0.0), fast(1.0)])
    )
    assert {point.rate_rps: list(point.good) for point in session.points()} == {1.0: [True, False, False, True], 2.0: [False]}


def test_invalid_runs_are_shown_and_do_not_count(tmp_path: Path) -> None:
    session = session_of(tmp_path, RunRecord(1.0, [fast(0.0)]), RunRecord(2.0, [slow(0.0)], "the client fell behind"))
    assert [run.invalid for run in session.summary().runs] == [None, "the client fell behind"]
    assert session.summary().goodput_rps == 1.0


def test_a_closed_loop_has_no_goodput(tmp_path: Path) -> None:
    session = Session("a", tmp_path, TERMS, {"load": "closed loop"})
    session.add(RunRecord(3.0, [fast(0.0)]))
    assert session.summary().goodput_bound == "unknown"


def test_a_run_starts_with_its_first_arrival() -> None:
    moved = from_first_arrival([fast(101.0), fast(100.0)])
    assert [lifeline.due_s for lifeline in moved] == [0.0, 1.0]
    assert [lifeline.ttft_s for lifeline in moved] == [pytest.approx(0.1)] * 2
    assert from_first_arrival([]) == []


WRONG_LINES = [
    "{",
    "[]",
    "5",
    "[" * 100_000,
    "\udcff",
    "{}",
    '{"run": 7}',
    '{"run": 0, "due_s": "x"}',
    '{"run": 0, "due_s": 0, "sent_s": 0, "ended_s": 0}',
    *(
        json.dumps({"run": 0, **dict.fromkeys(("sent_s", "ended_s", "finish_reason", "error", "asked_tokens")), **wrong})
        for wrong in (
            {"due_s": None, "prompt_tokens": 3, "ending": "error", "token_s": []},
            {"due_s": 0, "prompt_tokens": "3", "ending": "error", "token_s": []},
            {"due_s": 0, "prompt_tokens": 3, "ending": "error", "token_s": [math.nan]},
        )
    ),
]


@pytest.mark.parametrize("line", WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    session_of(tmp_path, RunRecord(1.0, [fast(0.0)]))
    with (tmp_path / REQUESTS_FILE).open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        Session.read("a", tmp_path)


@pytest.mark.parametrize("rate", ["NaN", "Infinity", '"fast"', "[" * 100_000])
def test_a_summary_with_a_figure_that_is_none_is_refused(tmp_path: Path, rate: str) -> None:
    session_of(tmp_path, RunRecord(1.0, [fast(0.0)]))
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace('"rate": 1.0', f'"rate": {rate}'))
    with pytest.raises(ConfigError, match="not a summary"):
        Session.read("a", tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        Session.read("a", tmp_path)


def test_samples_of_other_runs_are_refused(tmp_path: Path) -> None:
    session_of(tmp_path, RunRecord(1.0, [fast(0.0)]))
    (tmp_path / REQUESTS_FILE).write_text("")
    with pytest.raises(ConfigError, match="not of the same runs"):
        Session.read("a", tmp_path)
    (tmp_path / REQUESTS_FILE).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Session.read("a", tmp_path)


def test_every_line_is_plain_json(tmp_path: Path) -> None:
    session_of(tmp_path, RunRecord(1.0, [fast(0.0), Lifeline(1.0)]))
    lines = [json.loads(line) for line in (tmp_path / REQUESTS_FILE).read_text().splitlines()]
    assert [(line["run"], line["ending"], line["sent_s"]) for line in lines] == [(0, "complete", 0.0), (0, "unfinished", None)]
