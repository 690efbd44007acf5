"""Studies of several servers, with scripted ones in the place of those that would be started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from pdmux_ray.bench import ablation, compare_peer, steering
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.bench.load import client_health, conductor
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.load.outcome import measured
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.scripted_server import MODEL, Script, in_own_process
from pdmux_ray.bench.study import MOST_RUNS, Extent, Shape, Study
from pdmux_ray.errors import PdmuxError
from pdmux_ray.workload.source import load_workload

pytestmark = pytest.mark.bench

HEAD = "| TTFT p50, ms | p99 | ITL p50, ms | p99 | largest gap, ms | good | goodput, requests/s |"
QUICK = Script(first_s=0.03, gap_s=0.01)
SLO = "ttft=50x,itl=100x"  # which a machine that does other things keeps, too
SCRIPTS = {"auto": QUICK, "split": replace(QUICK, tokens=2)}  # whose answers are too short to be good, however quick


@pytest.fixture(autouse=True)
def _settled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "SETTLE_S", 0.1)  # scripted servers have no work left over


@pytest.fixture(autouse=True)
def _every_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this machine left the client its time is not what is asked here, but in test_generator.py."""
    monkeypatch.setattr(client_health, "judged", lambda *_: None)


@contextmanager
def serve(command: str, model: Path) -> Iterator[Target]:
    """A command is a name here, or the yardstick's."""
    if command == "half":
        raise PdmuxError("it does not start")
    with in_own_process([SCRIPTS.get(command, QUICK)]) as server:
        yield Target(server.url, MODEL)


def study(directory: Path, names: list[str], extent: Extent) -> Study:
    workload = load_workload("fixed:20,8", token_ids=TOKEN_IDS)
    shape = Shape(workload, Offer(workload, duration_s=extent.seconds), directory)
    deadline_s = time.monotonic() + 60
    return Study(names, lambda name, slo: name, directory, extent, [shape], SLO, 0, Console(stderr=True), deadline_s, serve)


def of_rates(session: Session) -> list[tuple[float, list[list[float]]]]:
    """Each rate in the order of its first run, with the arrivals of all its runs."""
    found: dict[float, list[list[float]]] = {}
    for record in session.records:
        found.setdefault(record.rate, []).append([lifeline.due_s for lifeline in record.lifelines])
    return list(found.items())


def test_a_search_finds_who_holds_the_grid_and_who_holds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    searched = study(tmp_path, ["split", "auto"], Extent(1, 0.3, requests=5, drain_s=1.0))
    with measured() as outcome:
        searched.carry_out(outcome)
    assert outcome.stopped is None
    (shape,) = searched.shapes
    bounds = {name: session.summary().goodput_bound for name, session in shape.sessions.items()}
    assert bounds == {"auto": "at_least", "split": "below"}
    (rate, clear_at_once), *_ = of_rates(shape.sessions["split"])
    unclear = of_rates(shape.sessions["auto"])
    assert all(len(runs) == 1 for _, runs in of_rates(shape.sessions["split"]))
    assert clear_at_once[0] == pytest.approx(dict(unclear)[rate][0], abs=1e-5)  # all servers get the same
    again = unclear[0][1]
    assert 1 < len(again) <= MOST_RUNS
    assert len({tuple(run) for run in again}) == len(again)  # each with requests of its own
    assert compare_peer.conclude_all(tmp_path, searched) is False  # nobody told how good the predictions were
    tables = (tmp_path / "tables.md").read_text()
    assert "split, the best of 1 fixed modes | at least" in tables
    assert tables.strip() in capsys.readouterr().out


def test_a_server_that_does_not_start_is_named_and_the_others_are_measured_at_the_same_rates(tmp_path: Path) -> None:
    ladder = study(tmp_path, ["half", "auto", "split"], Extent(1, 0.4, requests=1, drain_s=1.0, shares=(0.2, 0.4)))
    with measured() as outcome:
        ladder.carry_out(outcome)
    assert outcome.stopped is not None
    assert "half" in outcome.stopped
    (shape,) = ladder.shapes
    sent = {name: [one.due_s for r in s.records for one in r.lifelines] for name, s in shape.sessions.items()}
    assert sent["auto"] == pytest.approx(sent["split"], abs=1e-5)
    assert [record.rate for record in shape.sessions["auto"].records] == shape.rates
    ablation.conclude(tmp_path, ladder)
    rows = [line for line in (tmp_path / "tables.md").read_text().splitlines() if "dispatcher" in line]
    assert len(rows) == 4  # two servers at two rates
    assert all(row.count("|") == HEAD.count("|") + 1 for row in rows)
    assert HEAD in (tmp_path / "tables.md").read_text()


def test_together_all_servers_are_up_and_take_turns_at_every_rate(tmp_path: Path) -> None:
    up: list[str] = []
    most_up: list[list[str]] = []

    @contextmanager
    def counted(command: str, model: Path) -> Iterator[Target]:
        with serve(command, model) as target:
            up.append(command)
            most_up.append(list(up))
            yield target
            up.remove(command)

    extent = Extent(2, 0.3, requests=1, drain_s=1.0, shares=(0.2, 0.4), together=True)
    turns = replace(study(tmp_path, ["half", "auto", "split"], extent), serve=counted)
    with measured() as outcome:
        turns.carry_out(outcome)
    assert outcome.stopped is not None
    assert "half" in outcome.stopped
    assert most_up[-1] == ["auto", "split"]
    (shape,) = turns.shapes
    for name in ("auto", "split"):
        assert [record.rate for record in shape.sessions[name].records] == shape.rates * 2
    auto, split = (dict(of_rates(shape.sessions[name])) for name in ("auto", "split"))
    assert auto.keys() == split.keys()
    assert all(auto[rate][turn] == pytest.approx(split[rate][turn], abs=1e-5) for rate in auto for turn in (0, 1))


def test_a_run_that_the_client_spoilt_is_repeated_with_other_requests_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count()
    monkeypatch.setattr(client_health, "judged", lambda *_: "it was busy" if next(loads) % 2 else None)
    ladder = study(tmp_path, ["auto"], Extent(1, 0.3, requests=1, drain_s=1.0, shares=(0.2, 0.4, 0.6)))
    with measured() as outcome:
        ladder.carry_out(outcome)
    session = ladder.shapes[0].sessions["auto"]
    assert [record.rate for record in session.records if record.invalid is None] == ladder.shapes[0].rates
    assert [point.rate_rps for point in session.points()] == ladder.shapes[0].rates
    assert any(record.invalid for record in session.records)
    for _, runs in of_rates(session):
        assert len({tuple(run) for run in runs}) == len(runs) <= 2


def test_policies_are_held_against_each_other_and_the_way_of_every_request_is_counted(tmp_path: Path) -> None:
    names = ["predict", "local"]
    policies = study(tmp_path, names, Extent(1, 0.4, requests=1, drain_s=1.0, shares=(0.2, 0.4)))
    with measured() as outcome:
        policies.carry_out(outcome)
    assert outcome.stopped is None
    picture = tmp_path / "good.png"
    routes = {"predict": steering.Routes({"remote": 3.0, "local": 1.0}, landed=3.0)}
    assert steering.conclude(tmp_path, policies, routes, picture) is False  # both hold every rate: neither carries more
    tables = (tmp_path / "tables.md").read_text()
    assert "| predicted | 4 | 75 % | remote 75%, local 25% | – | – |" in tables
    assert "| 1P1D | predict ≥ 1.01 × never fetched | – |" in tables
    assert picture.stat().st_size > 0
    assert (tmp_path / "report.html").stat().st_size > 0
