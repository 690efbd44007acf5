"""`pdmux bench` from its command line to its files, against scripted servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray import cli
from pdmux_ray.bench.load import client_health
from pdmux_ray.bench.scripted_server import Remote, Script, in_own_process

pytestmark = pytest.mark.bench

QUICK = Script(first_s=0.05, gap_s=0.01)
LOAD = ("--workload", "fixed:8,6", "--requests", "12")
GENEROUS = ("--slo", "ttft=2,itl=1")
IDLE = re.compile(r"idle server: TTFT (\S+) ms .* median ITL (\S+) ms")


@pytest.fixture(autouse=True)
def _every_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this machine left the client its time is not what is asked here, but in test_generator.py."""
    monkeypatch.setattr(client_health, "judged", lambda *_: None)


@contextlib.contextmanager
def served(script: Script = QUICK) -> Iterator[str]:
    with in_own_process([script]) as server:
        yield server.url


def bench(*arguments: object) -> int:
    return cli.main(["bench", *map(str, arguments)])


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def test_one_server_at_its_rates_leaves_summary_samples_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as url:
        assert bench(url, *LOAD, *GENEROUS, "--rates", "10,20", "--warmup", "3", "--out", tmp_path) == 0
    summary = document(tmp_path / "summary.json")
    assert [(run["rate"], run["requests"], run["errors"], run["good_fraction"]) for run in summary["runs"]] == [
        (10.0, 12, 0, 1.0),
        (20.0, 12, 0, 1.0),
    ]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 24
    assert (tmp_path / "report.html").stat().st_size > 0
    assert "goodput" in capsys.readouterr().out
    (tmp_path / "report.html").unlink()
    assert bench("report", tmp_path) == 0
    assert (tmp_path / "report.html").stat().st_size > 0


def test_an_slo_in_multiples_of_the_idle_server_is_measured_and_stated(tmp_path: Path) -> None:
    with served() as url:
        assert bench(url, *LOAD, "--slo", "ttft=5x,itl=9x", "--rates", "20", "--out", tmp_path) == 0
    summary = document(tmp_path / "summary.json")
    (told,) = (found for note in summary["notes"] if (found := IDLE.search(note)))
    ttft_s, itl_s = (float(figure) / 1e3 for figure in told.groups())
    assert ttft_s >= QUICK.first_s
    assert (summary["slo"]["ttft_s"], summary["slo"]["itl_s"]) == pytest.approx((5 * ttft_s, 9 * itl_s), rel=0.01)


def test_a_comparison_gives_all_targets_the_same_and_states_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as fast, served(Script(first_s=0.15, gap_s=0.03)) as slow:
        both = (f"fast={fast}", f"slow={slow}")
        assert bench("compare", *both, *LOAD, *GENEROUS, "--rates", "20", "--rounds", "2", "--out", tmp_path) == 0
    sent = [[json.loads(line) for line in (tmp_path / name / "requests.jsonl").open()] for name in ("fast", "slow")]
    due = [[each["due_s"] for each in of_target] for of_target in sent]
    assert due[0] == pytest.approx(due[1], abs=2e-6)
    ratios = {found["measure"]: found["ratio"] for found in document(tmp_path / "comparison.json")["figures"]}
    ttfts_s = [median_ttft_s(of_target) for of_target in sent]
    assert ttfts_s[1] >= 0.15
    assert ratios["TTFT p50"] == pytest.approx(ttfts_s[1] / ttfts_s[0], rel=0.001)
    assert "goodput of slow over fast" in capsys.readouterr().out
    assert bench("compare", f"a={tmp_path}/fast", f"b={tmp_path}/slow", "--slo", "ttft=100ms", "--out", tmp_path / "again") == 0
    again = document(tmp_path / "again" / "comparison.json")
    assert {f["measure"]: f["value"] for f in again["figures"]}["good requests"] == 0.0
    assert bench("report", tmp_path / "again") == 0


def median_ttft_s(sent: list[dict[str, Any]]) -> float:
    """Of two rounds: the median of theirs."""
    rounds = [[float(each["token_s"][0] - each["due_s"]) for each in sent if each["run"] == run] for run in (0, 1)]
    return statistics.median([statistics.median(of_one) for of_one in rounds])


def test_a_server_that_fails_every_request_is_nothing_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(Script(status=500)) as url:
        assert bench(url, *LOAD, *GENEROUS, "--rates", "20", "--out", tmp_path) == 1
    assert "no request completed; the first error: HTTP 500" in capsys.readouterr().err
    assert document(tmp_path / "summary.json")["runs"][0]["errors"] == 12


def test_a_server_that_dies_stops_the_plan_and_its_run_is_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_own_process([QUICK]) as server:
        command = [sys.executable, "-m", "pdmux_ray.cli", "bench", server.url, *LOAD, *GENEROUS, "--rates", "4,8"]
        client = subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        wait_until_sending(client, server)
        os.kill(server.pid, signal.SIGKILL)
        _, told = client.communicate(timeout=60)
    assert client.returncode == 1
    runs = document(tmp_path / "summary.json")["runs"]
    assert len(runs) == 1
    assert "went away" in runs[0]["invalid"]
    assert "does not answer" in told


def test_ctrl_c_amid_a_run_writes_what_there_is_and_says_so(tmp_path: Path) -> None:
    with in_own_process([QUICK]) as server:
        command = [sys.executable, "-m", "pdmux_ray.cli", "bench", server.url, *LOAD, *GENEROUS, "--rates", "2"]
        client = subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        wait_until_sending(client, server)
        client.send_signal(signal.SIGINT)
        client.communicate(timeout=60)
    assert client.returncode == 130
    summary = document(tmp_path / "summary.json")
    assert summary["runs"][0]["invalid"] == "interrupted"
    assert 0 < summary["runs"][0]["requests"] < 12
    assert summary["goodput_bound"] == "unknown"
    assert (tmp_path / "report.html").exists()


def wait_until_sending(client: subprocess.Popen[str], server: Remote) -> None:
    """Until the server has had two requests of its load: it prints the SLO right before that."""
    assert client.stderr is not None
    assert any(line.startswith("SLO:") for line in client.stderr)
    while len(server.records()) < 2:
        assert client.poll() is None
        time.sleep(0.02)
