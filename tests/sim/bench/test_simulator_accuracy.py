from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmux_ray.bench.load.offer import Offer, Terms
from pdmux_ray.bench.load.session import RunRecord, Session
from pdmux_ray.bench.scaled_work import scaled
from pdmux_ray.bench.simulator_accuracy import LIMITS, ServedRun, answer, config_of, main, rows, served_runs, table
from pdmux_ray.costs.device import Slower
from pdmux_ray.costs.profiled import Profiled
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.report import figures
from tests.unit.sim.fleets import device

SLO = Slo(ttft_s=0.2, itl_s=0.03)
RATE, REQUESTS = 4.0, 12


def found(slower: float = 1.0) -> Profiled:
    return Profiled(replace(device(), slower=Slower(slower, slower, slower)), 2048, 0.0)


def leave(directory: Path, served: Profiled, requests: int = REQUESTS) -> None:
    """The files of a server in mode split that this device is the truth of, two runs."""
    session = Session("split", directory / "sharegpt" / "split", Terms(SLO), {"seed": "3"})
    for round_index in range(2):
        offer = Offer(scaled("sharegpt"), requests=requests, seed=3)
        run = ServedRun("sharegpt", "split", config_of("split", SLO), offer, RATE, round_index, SLO, ())
        session.add(RunRecord(RATE, answer(run, served, 0.0005)[0]))


def compared(directory: Path, device: Profiled, draws: int = 1) -> list[str]:
    runs = list(served_runs(directory))
    return table(rows(runs, [answer(run, device, 0.0005, draws) for run in runs]))


def test_runs_of_a_server_that_is_as_it_is_simulated_agree_in_every_figure(tmp_path: Path) -> None:
    leave(tmp_path, found())
    *_, row, last, apart = compared(tmp_path, found())
    assert row.startswith("| sharegpt | split | 4 |")
    assert row.count("0% |") == len(LIMITS)
    assert last.count("; 1 of 1") == len(LIMITS)
    assert apart.count(" 0.0% |") == len(LIMITS)


def test_a_server_that_is_slower_is_told_by_how_much(tmp_path: Path) -> None:
    leave(tmp_path, found(slower=1.5))
    row = compared(tmp_path, found())[-3]
    assert row.count("(!)") == len(LIMITS)
    assert row.endswith("2.00 → 4.00, +100% (!) |")  # of the good ones half were too slow in truth


def test_each_moment_is_a_draw_of_which_the_mean_counts_and_the_range_is_told(tmp_path: Path) -> None:
    leave(tmp_path, found())
    run = next(iter(served_runs(tmp_path)))
    slow, fast = answer(run, found(slower=1.2), 0.0005)[0], answer(run, found(slower=0.8), 0.0005)[0]
    (row,) = rows([run], [[slow, fast]])
    itls = [rows([run], [[one]])[0].simulated("ITL mean") for one in (fast, slow)]
    assert row.simulated("ITL mean") == pytest.approx(sum(itls) / 2)
    assert f"({figures.ms(itls[0])} to {figures.ms(itls[1])})" in table([row])[2]


def test_a_machine_that_was_slower_in_one_round_sets_the_errors_of_single_runs_apart(tmp_path: Path) -> None:
    leave(tmp_path, found())
    first, second = served_runs(tmp_path)
    slowed = replace(second, lifelines=answer(second, found(slower=1.25), 0.0005)[0])
    (row,) = rows([first, slowed], [answer(run, found(), 0.0005) for run in (first, second)])
    assert row.apart("ITL mean") == pytest.approx(0.2, abs=0.03)
    assert row.off("ITL mean") == pytest.approx(-0.1, abs=0.03)


def test_requests_that_are_not_those_of_the_workload_are_refused(tmp_path: Path) -> None:
    leave(tmp_path, found())
    requests = tmp_path / "sharegpt" / "split" / "requests.jsonl"
    requests.write_text(requests.read_text().replace('"prompt_tokens":', '"prompt_tokens":9'))
    with pytest.raises(ConfigError, match="its requests are not those that sharegpt has today"):
        list(served_runs(tmp_path))


def test_results_of_anything_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, found())
    (tmp_path / "sharegpt").rename(tmp_path / "other")
    assert main([str(tmp_path), "--profile", "p.json"]) == 2
    assert "is no SHAPE/TARGET" in capsys.readouterr().err
