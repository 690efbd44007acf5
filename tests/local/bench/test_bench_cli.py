"""Wrong arguments of `pdmux bench`: each is one line that says what to do, and nothing has been sent."""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from pathlib import Path

import pytest

from pdmux_ray import cli
from pdmux_ray.bench.load import outcome
from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.outcome import Outcome, reserve
from pdmux_ray.bench.load.session import RunRecord, Session
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.workload.source import SPECS

URL = "http://127.0.0.1:9"  # nobody is there; a request to it would end with 1, not 2
GOOD = ("--workload", "fixed:8,8", "--rates", "1", "--slo", "ttft=1")


def bench(out: Path, *arguments: str) -> int:
    try:
        return cli.main(["bench", *arguments, "--out", str(out)])
    except SystemExit as stop:
        return int(str(stop.code))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((URL, *GOOD[2:]), "--workload is missing"),
        ((URL, *GOOD[:4]), "--slo is missing"),
        ((URL, *GOOD[:2], *GOOD[4:]), "--rates, --search or --concurrency is missing"),
        ((URL, *GOOD, "--search", "1:2"), "not allowed with"),
        ((URL, *GOOD, "--requests", "2", "--duration", "2"), "not allowed with"),
        ((URL, *GOOD, "--rates", "0"), "'0' is not a number over 0"),
        ((URL, *GOOD, "--rates=-1"), "'-1' is not a number over 0"),
        ((URL, *GOOD, "--rates", "1,inf"), "'inf' is not a number over 0"),
        ((URL, *GOOD, "--rates", "1,1.0"), "has a value twice"),
        ((URL, *GOOD, "--rates", "1,"), "'' is not a number over 0"),
        ((URL, *GOOD, "--rates", "1e9"), "too many"),
        ((URL, *GOOD, "--requests", "99999999"), "too many"),
        ((URL, *GOOD, "--rates", "1e308"), "at most 1e+15"),
        ((URL, *GOOD, "--rates", "1e-9"), "more than 7 days"),
        ((URL, *GOOD, "--devices", "9" * 400), "at most 1e+15"),
        ((URL, *GOOD[:2], *GOOD[4:], "--requests", "1", "--concurrency", "9" * 400), "at most 1e+15"),
        ((URL, *GOOD, "--token-ids", "0:2000000000"), "Token ids end below"),
        ((URL, *GOOD, "--workload", "fixed:16000000,1", "--requests", "17"), "too many to be kept in memory"),
        ((URL, *GOOD, "--attainment", "1.1"), "not a share"),
        ((URL, *GOOD, "--token-ids", "9:3"), "LOW:HIGH"),
        ((URL, *GOOD[:2], *GOOD[4:], "--search", "4:2"), "LOW:HIGH"),
        ((URL, *GOOD[:2], *GOOD[4:], "--concurrency", "4"), "needs --requests"),
        ((URL, *GOOD, "--arrivals", "trace"), "times of its own"),
        ((URL, *GOOD, "--workload", "nothing"), "no workload 'nothing'"),
        ((URL, *GOOD, "--workload", "mooncake:/no/such/file"), "cannot be read"),
        ((URL, *GOOD, "--endpoint", "chat"), "Chat takes texts"),
        (("ftp://host", *GOOD), "not the address of a server"),
        (("http://[::1", *GOOD), "not the address of a server"),
        (("127.0.0.1:8000", *GOOD), "an address like http://"),
        (("compare", URL, *GOOD), "needs two targets"),
        (("compare", URL, URL, *GOOD), "the same name"),
        (("compare", f"a={URL}", f"b={URL}", *GOOD[:2], *GOOD[4:], "--search", "1:2"), "belongs to one server"),
        (("compare", f"a={URL}", "b=/no/such/run", *GOOD), "does not exist"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert bench(tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "summary.json").exists()


def test_a_server_that_is_not_there_is_nothing_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path / "out", URL, *GOOD) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_help_names_every_workload(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no name is broken
    with pytest.raises(SystemExit):
        cli.main(["bench", "run", "--help"])
    told = capsys.readouterr().out
    assert [spec for spec in SPECS if spec not in told] == []


def test_results_are_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        reserve(tmp_path, force=False)
    reserve(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_written_is_told_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        reserve(tmp_path / "file" / "out", force=False)


def test_two_measurements_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)  # as another process has it
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another measurement is writing"):
        reserve(tmp_path, force=True)
    os.close(other)
    reserve(tmp_path, force=True)
    reserve(tmp_path, force=True)  # the process that has it may come again


def finished(directory: Path) -> None:
    """One run of one request that was good."""
    lifeline = Lifeline(0.0, 0.0, array("d", [0.1]), 0.1, Ending.COMPLETE, "length", asked_tokens=1)
    Session("it", directory, Terms(Slo(ttft_s=1.0)), {}).add(RunRecord(1.0, [lifeline]))


def test_what_is_compared_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "one")
    finished(tmp_path / "two")
    assert bench(tmp_path / "one", "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--force") == 2
    assert "would replace it" in capsys.readouterr().err
    assert (tmp_path / "one" / "requests.jsonl").exists()


def test_what_cannot_be_written_is_told_and_the_figures_are_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path)
    session = Session.read("it", tmp_path)
    session.finished = False

    def full(path: Path, text: str, encoding: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert Outcome([session]).finish(tmp_path) == 1
    told = capsys.readouterr()
    assert "No space left" in told.err
    assert "goodput" in told.out
    assert cli.main(["bench", "report", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_ctrl_c_amid_the_report_says_how_to_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    finished(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(outcome, "write_report", interrupted)
        assert outcome.Outcome([Session.read("it", tmp_path)]).finish(tmp_path) == 130
    assert f"`pdmux bench report {tmp_path}`" in capsys.readouterr().err
    assert cli.main(["bench", "report", str(tmp_path)]) == 0


def test_a_report_needs_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "run", "--help"], ["bench", "compare", "--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "pdmux bench" in capsys.readouterr().out


def test_what_stops_a_measurement_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = outcome.Outcome([])
    for _ in range(2):
        stopped.stop("the disk is full")
    assert stopped.stopped == "the disk is full"
    assert capsys.readouterr().err.count("the disk is full") == 1
