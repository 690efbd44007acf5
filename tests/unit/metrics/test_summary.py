from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics import summary as summaries
from pdmux_ray.metrics.goodput import DEFINITION, Bound, RatePoint, Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.metrics.summary import RunSummary, Stats, Summary, rate_point, summarize, summarize_run
from tests.examples import tried
from tests.unit.metrics.lifelines import lifelines, served, stalled_queue

SLO = Slo(ttft_s=1.0, itl_s=0.3)


def failed(due_s: float = 0.0) -> Lifeline:
    lifeline = Lifeline(due_s, due_s)
    lifeline.fail(due_s + 9.0, "HTTP 500")
    return lifeline


def unfinished() -> Lifeline:
    lifeline = Lifeline(0.0, 0.0)
    lifeline.tokens_arrived(0.5)
    return lifeline


def run(rate: float = 2.0, *requests: Lifeline, invalid: str | None = None) -> RunSummary:
    return summarize_run("one", rate, requests or [served(0.5, 0.7)], SLO, invalid)


def whole(*runs: RunSummary, points: list[RatePoint] | None = None, devices: int = 1) -> Summary:
    measured = [RatePoint(2.0, [True])] if points is None else points
    return summarize(list(runs) or [run()], measured, SLO, 0.9, devices)


def test_the_file_holds_what_was_promised_at_the_paths_that_were_promised(tmp_path: Path) -> None:
    document = json.loads(summaries.write(whole(), tmp_path).read_text())
    assert (tmp_path / "summary.json").exists()
    assert {"runs", "goodput_rps", "goodput_ci", "slo", "attainment", "definition"} <= document.keys()
    assert document["definition"] == DEFINITION
    assert (document["goodput_rps"], document["goodput_ci"], document["attainment"]) == (2.0, [2.0, 2.0], 0.9)
    assert document["slo"] == {"ttft_s": 1.0, "itl_s": 0.3, "ttft_s_per_token": 0.0, "itl_statistic": "p99"}
    first = document["runs"][0]
    assert (first["target"], first["rate"], first["requests"], first["errors"]) == ("one", 2.0, 1, 0)
    assert first["good_fraction"] == 1.0
    assert first["output_tokens_per_s"] == pytest.approx(2 / 0.7)
    for measure in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        assert first[measure].keys() == {"mean", "p50", "p90", "p99", "max"}
    assert first["ttft_s"]["p50"] == 0.5


def test_every_figure_of_a_run() -> None:
    due_s = [0.0, 1.0, 2.0, 3.0]
    requests = [served(due + 0.5, due + 0.5 + 0.1 * (n + 1), due_s=due, sent_s=due + 0.01 * n) for n, due in enumerate(due_s)]
    for lifeline in requests:
        lifeline.prompt_tokens = 10
    found = run(1.0, *reversed(requests))
    assert found.ttft_s == Stats(*[pytest.approx(0.5)] * 5)
    assert found.itl_s == Stats(*(pytest.approx(s) for s in (0.25, 0.25, 0.37, 0.397, 0.4)))
    assert found.tpot_s == found.itl_s
    assert found.e2e_s.max == pytest.approx(0.9)
    assert found.send_lag_s.max == pytest.approx(0.03)
    assert found.duration_s == pytest.approx(3.9)
    assert (found.prompt_tokens, found.output_tokens) == (40, 8)
    assert found.output_tokens_per_s == pytest.approx(8 / 3.9)
    assert found.good_fraction == 0.75
    assert found.verdicts == {"good": 3, "itl": 1, "ttft": 0, "error": 0, "truncated": 0, "unfinished": 0}


def test_all_gaps_count_alike_whichever_request_they_are_of() -> None:
    found = run(1.0, served(0.0, 1.0), served(0.0, *(0.1 * token for token in range(1, 10))))
    assert found.itl_s.p50 == pytest.approx(0.1)
    assert found.itl_s.mean == pytest.approx(1.9 / 10)


def test_what_did_not_complete_is_an_error_and_late_is_not() -> None:
    found = run(1.0, served(0.5), served(5.0), failed(), unfinished(), served())
    assert (found.requests, found.errors, found.good_fraction) == (5, 3, 0.2)
    assert found.verdicts == {"good": 1, "ttft": 1, "error": 1, "unfinished": 1, "truncated": 1, "itl": 0}


def test_a_stall_is_in_the_figures_of_every_request_that_was_due_meanwhile() -> None:
    found = run(10.0, *stalled_queue(requests=100, period_s=0.1, begin_s=2.0, end_s=7.0))
    assert found.ttft_s.max == pytest.approx(5.0)
    assert found.ttft_s.mean == pytest.approx(0.1 * sum(range(1, 51)) / 100)
    assert found.ttft_s.p90 == pytest.approx(4.01)
    assert found.good_fraction == 0.6


def test_a_run_without_any_answer_has_figures_of_none() -> None:
    found = run(1.0, failed())
    assert (found.ttft_s, found.itl_s, found.e2e_s) == (Stats(*[None] * 5),) * 3
    assert (found.output_tokens_per_s, found.duration_s, found.good_fraction) == (0.0, 0.0, 0.0)


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="No request was sent to one at 2 requests/s"):
        summarize_run("one", 2.0, [], SLO)


def test_goodput_is_per_device() -> None:
    points = [rate_point(2.0, [served(0.5)], SLO), rate_point(4.0, [served(5.0)], SLO)]
    one, two = whole(points=points), whole(points=points, devices=2)
    assert one.goodput_rps == pytest.approx(2.2)
    assert two.goodput_rps == pytest.approx(1.1)
    assert two.goodput_ci == tuple(rps / 2 for rps in one.goodput_ci)


def test_the_verdicts_of_a_rate_are_in_the_order_of_arrival() -> None:
    late, early = served(9.0, due_s=1.0), served(0.5, due_s=0.0)
    assert rate_point(2.0, [late, early], SLO).good == [True, False]


def test_without_a_valid_run_the_goodput_is_unknown() -> None:
    summary = whole(run(2.0, invalid="the client fell behind"), points=[])
    assert (summary.goodput_rps, summary.goodput_bound) == (0.0, Bound.UNKNOWN.value)


@settings(max_examples=tried(20), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(lifelines(), min_size=1, max_size=8), st.sampled_from([Slo(), SLO, Slo(itl_s=0.1, itl_statistic="mean")]))
def test_any_summary_is_read_as_it_was_written(tmp_path: Path, requests: list[Lifeline], slo: Slo) -> None:
    runs = [summarize_run("one", rate, requests, slo, invalid) for rate, invalid in ((1.0, None), (2.5, "late"))]
    summary = summarize(runs, [rate_point(1.0, requests, slo)], slo, 0.9, 2)
    summary = replace(summary, conditions={"workload": "fixed:8,8"}, notes=("tokens were counted",))
    path = summaries.write(summary, tmp_path)
    assert summaries.read(tmp_path) == summary
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@given(st.lists(lifelines(), min_size=1, max_size=8))
def test_the_figures_of_any_run_are_in_order(requests: list[Lifeline]) -> None:
    found = summarize_run("one", 1.0, requests, SLO)
    assert sum(found.verdicts.values()) == found.requests == len(requests)
    assert found.good_fraction == found.verdicts["good"] / found.requests
    for stats in (found.ttft_s, found.itl_s, found.tpot_s, found.e2e_s, found.send_lag_s):
        if stats.mean is not None and stats.p50 is not None and stats.max is not None:
            assert stats.p50 <= stats.p90 <= stats.p99 <= stats.max  # type: ignore[operator]
            assert stats.mean <= stats.max * (1 + 1e-12)


def test_a_figure_that_is_no_number_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = summaries.write(whole(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        summaries.write(replace(whole(), goodput_rps=math.nan), tmp_path)
    assert path.read_bytes() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        summaries.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 5}', '{"runs": [], "slo": {"p99": 1}, "goodput_ci": []}'])
def test_a_file_that_is_no_summary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match="not a summary"):
        summaries.read(tmp_path)


def test_an_unsent_request_has_no_send_lag() -> None:
    assert run(1.0, Lifeline(0.0, ending=Ending.ERROR)).send_lag_s == Stats(*[None] * 5)
