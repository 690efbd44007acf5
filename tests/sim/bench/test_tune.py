"""`pdmux tune`: what it leaves, what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from pdmux_ray import cli
from pdmux_ray.bench import tune_report
from pdmux_ray.bench.tune_plan import MODES, Plan
from pdmux_ray.config import load_serve_config
from pdmux_ray.metrics.dashboards.expected import read
from pdmux_ray.tune.candidates import Candidate, Kind, Space, Topology
from pdmux_ray.tune.estimate import Work
from pdmux_ray.tune.fake_trials import FakeTrials
from pdmux_ray.tune.search import Outcome, Search, Variant
from pdmux_ray.tune.standing import Standing, conclusion
from pdmux_ray.tune.trial import Changes
from pdmux_ray.types import Mode
from tests.unit.costs.profiles import model, profile

GOOD = ("--workload", "fixed:500,4", "--gpus", "2", "--slo", "ttft=0.5,itl=20ms", "--model", "llama-8b", "--gpu", "H200")
SMALL = ("--requests", "12", "--tp", "1", "--modes", "auto", "--thresholds", "512", "--workers", "1")


def tune(path: Path, *arguments: str) -> int:
    try:
        return cli.main(["tune", *arguments, "--out", str(path / "out")])
    except SystemExit as stop:
        return int(str(stop.code))


def plan(path: Path, *arguments: str) -> Plan:
    return Plan.of(cli.parser().parse_args(["tune", *arguments, "--out", str(path / "out")]))


def with_option(name: str, value: str) -> tuple[str, ...]:
    index = GOOD.index(name)
    return (*GOOD[: index + 1], value, *GOOD[index + 2 :])


def test_it_leaves_a_page_its_data_a_config_that_servers_take_and_what_to_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path, *GOOD, *SMALL, "--no-sensitivity") == 0
    out = tmp_path / "out"
    assert {"report.html", "tune.json", "serve.yaml", "expected.json", "dashboards"} <= {path.name for path in out.iterdir()}
    told = capsys.readouterr()
    found = json.loads((out / "tune.json").read_text())
    assert all(line in told.out for line in found["conclusion"])
    assert found["confirmed"][0]["goodput_rps_per_gpu"] > 1
    assert {"aggregated", "disaggregated", "mixed"} == {each["kind"] for each in found["candidates"]}
    served = next(each for each in found["confirmed"] if each["kind"] == "aggregated")
    _, config = load_serve_config(out / "serve.yaml")
    assert (len(config.roles), config.topology) == (2, None)
    assert read(out / "expected.json").goodput_rps == pytest.approx(2 * served["goodput_rps_per_gpu"])
    assert cli.main(["config", "check", str(out / "serve.yaml")]) == 0
    assert tune(tmp_path, *GOOD, *SMALL) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (with_option("--slo", "ttft=5x,itl=3x"), "Give seconds"),
        (with_option("--slo", "ttft=0.5"), "needs both objectives"),
        (with_option("--model", "llama-9b"), "there is no shape 'llama-9b'"),
        ((*GOOD, "--tp", "3"), "heads"),
        ((*GOOD, "--gpus", "6", "--tp", "4"), "6 GPUs are no whole number"),
        ((*GOOD, "--gpus", "100000"), "at most 256"),
        ((*GOOD, "--modes", "auto,fast"), "is not a list of modes"),
        ((*GOOD, "--assume", "link=x"), "KEY=NUMBER"),
        ((*GOOD[2:], "--trace", "fixed:8,8"), "--trace takes mooncake:FILE or azure:FILE"),
        ((*GOOD[2:], "--trace", "azure:missing"), "missing"),
        ((*GOOD[2:],), "one of the arguments --trace --workload is required"),
        ((*GOOD[:-2],), "one of the arguments --gpu --profile is required"),
        ((*with_option("--model", "llama-70b"), "--tp", "1"), "TP 1 is left out"),
    ],
)
def test_what_cannot_be_tuned_is_told_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tune(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_instances_without_room_for_the_load_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    found = plan(tmp_path, *with_option("--model", "llama-70b"), "--gpus", "8")
    assert found.space.tps == [2, 4, 8]
    assert any(note.startswith("TP 1 is left out") for note in found.notes)


def test_a_run_is_about_a_minute_of_arrivals_unless_it_is_said(tmp_path: Path) -> None:
    assert plan(tmp_path, *GOOD).setting.requests >= 300
    assert plan(tmp_path, *GOOD, "--requests", "77").setting.requests == 77


def test_of_a_trace_the_requests_that_follow_confirm_and_it_is_told_when_there_are_too_few(tmp_path: Path) -> None:
    lines = [{"timestamp": i * 100, "input_length": 40, "output_length": 4, "hash_ids": [i]} for i in range(100)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = ("--trace", f"mooncake:{tmp_path / 't.jsonl'}", *GOOD[2:])
    some, all_ = plan(tmp_path, *source, "--requests", "20"), plan(tmp_path, *source, "--requests", "60")
    assert (some.setting.skip, some.fresh.skip, some.setting.arrivals.kind) == (0, 20, "trace")
    assert any("Confirmed on other requests" in note for note in some.notes)
    assert (all_.fresh.skip, all_.fresh.seed != all_.setting.seed) == (0, True)
    assert any("confirmed on the same ones" in note for note in all_.notes)


def test_a_profile_has_one_device_and_only_its_link_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model(tmp_path / "model")
    (tmp_path / "p.json").write_text(profile(directory).model_dump_json())
    mine = ("--model", str(directory), "--profile", str(tmp_path / "p.json"))
    found = plan(tmp_path, *GOOD[:6], *mine)
    assert found.space.tps == [1]
    assert {variant.name for variant in found.variants(found.space.first())} == {"link", "spread", "line"}
    assert tune(tmp_path, *GOOD[:6], *mine, "--costs", "silicon") == 2
    assert "go with --gpu" in capsys.readouterr().err


def test_every_assumption_that_could_matter_is_halved_and_doubled(tmp_path: Path) -> None:
    found = plan(tmp_path, *GOOD, "--tp", "1,2")
    one = [candidate for candidate in found.space.first() if candidate.topology.tp == 1]
    alone = [candidate for candidate in one if candidate.topology.kind is Kind.AGGREGATED]
    names = {variant.name for variant in found.variants(found.space.first())}
    assert names >= {"decode_beside", "compute_exponent", "host_s", "allreduce_s", "link", "spread", "line"}
    assert {variant.name for variant in found.variants(one)} == names - {"allreduce_s", "allreduce_efficiency"}
    assert "link" not in {variant.name for variant in found.variants(alone)}
    silicon = {
        variant.name for variant in plan(tmp_path, *GOOD, "--tp", "1,2", "--costs", "silicon").variants(found.space.first())
    }
    assert silicon == names - {"allreduce_s", "allreduce_efficiency"}  # measured
    guards = [variant.changes.assume for variant in found.variants(one) if variant.name == "guard"]
    assert guards == [(("guard", 1.05),), (("guard", pytest.approx(1.2)),)]


@pytest.mark.parametrize(
    ("winner", "served", "lacking"),
    [
        (Topology(1, 1, 1, 0), Topology(1, 0, 2, 0), "GPU instances cannot share their KV yet"),
        (Topology(2, 0, 1, 0), Topology(1, 0, 2, 0), "servers have no tensor parallelism yet"),
        (Topology(1, 0, 2, 0), Topology(1, 0, 2, 0), ""),
    ],
)
def test_the_config_is_of_the_best_that_servers_run_and_the_winner_s_is_beside_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    winner: Topology,
    served: Topology,
    lacking: str,
) -> None:
    trials = FakeTrials(lambda candidate, changes: {winner: 2.0, served: 1.5}.get(candidate.topology, 1.0))
    monkeypatch.setattr("pdmux_ray.bench.tune.workers", lambda *settings: nullcontext(trials.submit))
    monkeypatch.setattr(Work, "most_rps", lambda work, topology: 1.5)
    assert tune(tmp_path, *GOOD, *SMALL, "--tp", "1,2", "--no-sensitivity") == 0
    out, told = tmp_path / "out", capsys.readouterr().out
    _, config = load_serve_config(out / "serve.yaml")
    assert (config.topology, len(config.roles)) == (None, 2)
    assert (out / "winner.yaml").exists() is (winner != served)
    assert (f"serve.yaml is of the best that they run, {served}, TP 1, auto: " in told) is (winner != served)
    if lacking:
        assert lacking in told
        assert lacking in (out / "winner.yaml").read_text().partition("applications:")[0]
        assert cli.main(["config", "check", str(out / "winner.yaml")]) == 0


def test_the_config_is_of_one_that_is_surely_better_on_other_requests_than_those_that_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carried(by_mode: dict[Mode, float]) -> FakeTrials:
        alike = Topology(1, 0, 2, 0)
        return FakeTrials(lambda candidate, changes: by_mode[candidate.mode] if candidate.topology == alike else 0.8)

    chosen, fresh = carried({Mode.AUTO: 2.0, Mode.CHUNKED: 1.99}), carried({Mode.AUTO: 1.0, Mode.CHUNKED: 2.0})
    submit = lambda job: (fresh if job.fresh else chosen).submit(job)  # noqa: E731
    monkeypatch.setattr("pdmux_ray.bench.tune.workers", lambda *settings: nullcontext(submit))
    monkeypatch.setattr(Work, "most_rps", lambda work, topology: 1.5)
    small = [*SMALL[:5], "auto,chunked", *SMALL[6:]]
    assert tune(tmp_path, *GOOD, *small, "--no-sensitivity") == 0
    _, config = load_serve_config(tmp_path / "out" / "serve.yaml")
    assert config.engine.mode is Mode.CHUNKED
    assert not (tmp_path / "out" / "winner.yaml").exists()


def test_where_no_server_runs_any_that_holds_there_is_no_config_to_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = FakeTrials(lambda candidate, changes: 1.5)
    monkeypatch.setattr("pdmux_ray.bench.tune.workers", lambda *settings: nullcontext(trials.submit))
    monkeypatch.setattr(Work, "most_rps", lambda work, topology: 1.5)
    assert tune(tmp_path, *with_option("--model", "opt-13b"), *SMALL, "--max-context", "2000", "--no-sensitivity") == 0
    assert not (tmp_path / "out" / "serve.yaml").exists()
    assert "There is no serve.yaml." in capsys.readouterr().out


def test_runs_last_several_answers_and_many_times_what_a_first_token_may_take_or_it_is_told(tmp_path: Path) -> None:
    usual, patient = plan(tmp_path, *GOOD), plan(tmp_path, *with_option("--slo", "ttft=6,itl=20ms"))
    assert patient.setting.requests == pytest.approx(2 * usual.setting.requests, abs=1)
    assert not [note for note in patient.notes if "too short" in note]
    short = plan(tmp_path, *with_option("--slo", "ttft=6,itl=20ms"), "--requests", str(usual.setting.requests))
    assert any(note.startswith("Runs are too short, of about 60") and "--requests" in note for note in short.notes)


def searched(mixed: float) -> Outcome:
    def capacity(candidate: Candidate, changes: Changes) -> float:
        is_mixed = candidate.topology.kind is Kind.MIXED and not changes.assume
        return mixed * (1 + candidate.topology.prefill / 10) if is_mixed else 1.0

    space = Space(4, (1,), MODES[:2], (512,))
    variants = (Variant("link", "0.5", Changes(assume=(("link", 0.5),))),)
    return Search(space, {1: Work(1.0, 1.0)}, FakeTrials(capacity).submit, 0.9, 1, variants=lambda found: variants).run()


def test_the_page_has_the_conclusion_the_ratio_and_what_it_depends_on() -> None:
    outcome = searched(2.0)
    text = tune_report.page("a load", outcome, conclusion(outcome.confirmed), ["a note"], "lead")
    for words in ("Take 3P+1M", "Goodput over the ratio", "another kind", "a note", "triangle-down"):
        assert words in text


def test_the_chart_has_the_best_candidate_of_each_ratio() -> None:
    points = tune_report.ratio_points(searched(2.0).standings)
    mixed = [point for point in points if point.series == "mixed, TP 1"]
    assert [point.share for point in mixed] == [0.0, 0.25, 0.5, 0.75]
    assert [point.rps for point in mixed] == sorted(point.rps for point in mixed)
    assert {point.series for point in points} == {"mixed, TP 1", "disaggregated, TP 1"}


def test_who_was_left_as_beaten_is_shown_as_less() -> None:
    standings = searched(2.0).standings
    beaten = next(standing for standing in standings if standing.beaten)
    assert isinstance(beaten, Standing)
    assert tune_report.rows([beaten])[0][4].startswith("< ")


def test_the_modes_that_are_tried_are_all_there_are() -> None:
    assert set(MODES) == set(Mode)
    assert MODES[0] is Mode.AUTO
