from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from pdmux_ray.bench.line_time import main, ways_s
from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.session import RunRecord, Session
from pdmux_ray.engine.timeline import Arrival, Ended, Record
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.metrics.trace import Source, Trace, chrome_trace

OTHER_CLOCK_S = 1000.0
RUNS_S = (0.5, 0.7)  # in the instance


def lifelines(way_s: float) -> list[Lifeline]:
    """Of two requests, whose last token comes when the instance has ended them and the way there and back has passed."""
    found = []
    for index, run_s in enumerate(RUNS_S):
        sent_s = index + 0.25
        life = Lifeline(float(index), sent_s, array("d", [sent_s + 0.1, sent_s + run_s + way_s]), prompt_tokens=10 + index)
        life.complete(index + 2.0, "length")
        found.append(life)
    return found


def trace() -> Trace:
    """Of the instance: another request comes before the two."""
    records: list[Record] = [Arrival("arrival", 0, OTHER_CLOCK_S - 5, "before", 99)]
    for index, run_s in enumerate(RUNS_S):
        came_s = OTHER_CLOCK_S + index + 0.25
        records.append(Arrival("arrival", 0, came_s, str(index), 10 + index))
        records.append(Ended("ended", 0, came_s + run_s, str(index), "length", 2))
    return chrome_trace([Source("one", 2, records)], OTHER_CLOCK_S + 5)


def leave(directory: Path, way_s: float) -> None:
    session = Session("auto", directory / "sharegpt" / "auto", Terms(Slo(ttft_s=1.0, itl_s=1.0)), {"seed": "3"})
    session.add(RunRecord(1.0, lifelines(9.0)))  # an earlier one
    session.add(RunRecord(2.0, lifelines(way_s)))
    (session.directory / "timeline.json").write_text(json.dumps(trace()))


def test_what_a_client_counts_more_than_the_instance_is_the_way_there_and_back() -> None:
    assert list(ways_s(lifelines(0.006), trace())) == pytest.approx([0.006, 0.006])


def test_a_message_takes_half_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, 0.006)
    assert main([str(tmp_path)]) == 0
    assert "2 requests: there and back 6.00 ms in the mean" in (told := capsys.readouterr().out)
    assert told.endswith("--line 0.003\n")


def test_a_timeline_of_other_requests_is_refused() -> None:
    others = lifelines(0.006)
    others[0].prompt_tokens = 11
    with pytest.raises(ConfigError, match="are not those of the last run"):
        list(ways_s(others, trace()))


def test_where_nothing_was_left_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no request of any run was completed" in capsys.readouterr().err
