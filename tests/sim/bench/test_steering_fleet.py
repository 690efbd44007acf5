"""The simulated half of the comparison of routes: what is claimed of its outcomes, and how they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from pdmux_ray.bench import steering, steering_fleet
from pdmux_ray.bench.claims import Verdict
from pdmux_ray.bench.simulated_steering import SLO, WAYS, Outcome, Way
from pdmux_ray.metrics.goodput import RatePoint
from pdmux_ray.metrics.summary import summarize, summarize_run
from tests.unit.metrics.lifelines import served


def outcome(name: str, good: dict[float, float]) -> Outcome:
    """20 requests at each rate, of which the share that is given is good."""
    verdicts = {rate: [index < share * 20 for index in range(20)] for rate, share in good.items()}
    runs = [
        summarize_run(name, rate, [served(0.1 if each else 9.0) for each in found], SLO) for rate, found in verdicts.items()
    ]
    points = [RatePoint(rate, found) for rate, found in verdicts.items()]
    reasons = [{"remote": 15, "local": 5} for _ in good]
    return Outcome(Way(name, "predict"), summarize(runs, points, SLO, 0.9, 4), points, reasons, [None for _ in good])


def test_predicting_is_held_against_each_other_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, less, none = {40.0: 1.0, 80.0: 0.8}, {40.0: 1.0, 80.0: 0.5}, {40.0: 0.5, 80.0: 0.5}
    found = [outcome("predict", more), outcome("local", less), outcome("remote", none), outcome("threshold-9", more)]
    held = steering_fleet.found_claims(found, steering.BEATS)
    assert [claim.over for claim in held] == ["local", "remote", "threshold-9"]
    assert [claim.verdict in (Verdict.HOLDS, Verdict.LIKELY) for claim in held] == [True, True, False]
    assert steering_fleet.conclude(tmp_path, found, steering.BEATS) is False
    shown = capsys.readouterr().out
    assert "| way | good at 40/s | good at 80/s | goodput, requests/s and GPU | reasons |" in shown
    assert "| remote | 50 % | 50 % | below 10.0 | remote 75%, local 25% |" in shown
    assert "| remote | below 10.0 | below 10.0 | below 10.0 |" in shown
    assert "| predict | 15.0 (" in shown, "it loses an attainment of 90 % half-way between the two rates"
    assert shown.count(f"predict ≥ {steering.BEATS:g} × local") == 3
    assert (tmp_path / "simulated.md").read_text().strip() in shown


def test_every_way_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    ways = [Way("predict", "predict"), Way("local", "local")]
    found = steering_fleet.outcomes(steering_fleet.workload(10), [2.0], 1.0, 0, Console(stderr=True), ways)
    assert [one.way.name for one in found] == ["predict", "local"]
    assert "all ways" in capsys.readouterr().err


def test_ways_are_chosen_by_name_and_else_are_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [way.name for way in steering_fleet.chosen("remote,predict")] == ["remote", "predict"]
    assert tuple(steering_fleet.chosen(None)) == WAYS
    assert steering.main(["--simulated", "--targets", "threshold-128", "--out", str(tmp_path)]) == 2
    assert "no prefill instances" in capsys.readouterr().err


def test_rates_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steering.main(["--simulated", "--rates", "0,5", "--out", str(tmp_path)]) == 2
    assert "--rates" in capsys.readouterr().err
