"""Verdicts, and a report that is on disk before the next measurement begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray.gpu_check.report import FILE_NAME, Limit, Report, Row, Verdict, line_of, summary

AT_LEAST_75 = Limit(75.0, at_least=True)
AT_MOST_200 = Limit(200.0)


def written(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / FILE_NAME).read_text())
    return document


@pytest.mark.parametrize(
    ("limit", "value", "verdict"),
    [
        (AT_LEAST_75, 75.0, Verdict.OK),
        (AT_LEAST_75, 74.9, Verdict.FAILED),
        (AT_MOST_200, 200.0, Verdict.OK),
        (AT_MOST_200, 200.1, Verdict.FAILED),
        (AT_LEAST_75, math.nan, Verdict.FAILED),
        (AT_MOST_200, math.nan, Verdict.FAILED),
    ],
)
def test_a_limit_is_kept_up_to_exactly_itself_and_never_by_what_is_no_number(
    limit: Limit, value: float, verdict: Verdict
) -> None:
    assert limit.row("it", value).verdict is verdict


def test_where_speed_means_nothing_only_limits_of_speed_go_unjudged() -> None:
    assert AT_LEAST_75.row("it", 1.0, judged=False).verdict is Verdict.NOT_JUDGED
    assert Limit(0, speed=False).row("it", 1.0, judged=False).verdict is Verdict.FAILED


def test_every_row_is_shown_and_written_as_it_comes(tmp_path: Path) -> None:
    shown: list[str] = []
    report = Report(tmp_path, {"device": "cuda"}, shown.append)
    assert written(tmp_path) == {"device": "cuda", "complete": False, "failed": False, "checks": []}
    report.begin("decode", "steps")
    report.add(AT_LEAST_75.row("share", 80.0, "%"))
    (part,) = written(tmp_path)["checks"]
    assert (part["result"], part["rows"][0]["value"], part["rows"][0]["verdict"]) == ("interrupted", 80.0, "ok")
    assert shown == [line_of(report.parts[0].rows[0])]
    report.add(AT_MOST_200.row("switch", 300.0, "us"))
    report.end(1.5)
    assert written(tmp_path)["failed"]
    assert not written(tmp_path)["complete"]
    report.close(2.0)
    assert written(tmp_path)["complete"]


def test_what_is_no_number_is_null_in_the_report(tmp_path: Path) -> None:
    report = Report(tmp_path, {}, lambda line: None)
    report.begin("headline", "")
    report.add(AT_MOST_200.row("p99 of no gaps", math.nan))
    ((row,),) = [part["rows"] for part in written(tmp_path)["checks"]]
    assert (row["value"], row["verdict"]) == (None, "FAILED")


def test_a_check_without_a_judged_row_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    report = Report(tmp_path, {}, lambda line: None)
    report.begin("machine", "what it is")
    report.add(Row("GPU", "NVIDIA H200"))
    report.end(0.1)
    assert report.parts[0].word == "not judged"
    assert not report.failed


def test_the_summary_has_a_line_for_each_check(tmp_path: Path) -> None:
    report = Report(tmp_path, {}, lambda line: None)
    for name, value in (("decode", 80.0), ("prefill", 10.0)):
        report.begin(name, "")
        report.add(AT_LEAST_75.row("share", value, "%"))
        report.end(1.0)
    _, decode, prefill = summary(report.parts).splitlines()
    assert decode.split() == ["decode", "1", "1", "0", "1.0", "ok"]
    assert prefill.split() == ["prefill", "1", "1", "1", "1.0", "FAILED"]
