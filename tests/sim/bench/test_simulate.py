"""`pdmux simulate`: what it leaves, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pdmux_ray import cli
from pdmux_ray.bench.load.offer import Offer
from pdmux_ray.bench.simulate import KINDS, as_served
from pdmux_ray.bench.simulated_runs import Setup, Simulated, one_run, runs
from pdmux_ray.costs.device import Slower
from pdmux_ray.costs.gpu import GPUS, SHAPES
from pdmux_ray.costs.profiled import Profiled
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics import summary
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.report.progress import Progress
from pdmux_ray.workload.source import load_workload
from tests.unit.costs.profiles import model, profile
from tests.unit.sim.fleets import config, device

SLO = Slo(ttft_s=0.5, itl_s=0.05)
GOOD = ("--workload", "fixed:40,4", "--rates", "4", "--requests", "12", "--slo", "ttft=0.5,itl=50ms")
MUX = {"engine": {"device": "cuda", "mode": "auto", "multiplex": {"itl_s": 0.02}}}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """A small fleet, one that prefills and one that does both: each prompt takes it 10 ms."""
    offer = Offer(load_workload("fixed:100,3", token_ids=(1000, 40000)), requests=30, seed=3)
    return Setup(config(), device(), 256, 0.05, 0.0005, offer, 60.0, tmp_path)


def run(setup: Setup, rate: float) -> Simulated:
    return one_run(setup, rate, lambda ended: None)


def summed(found: Simulated) -> summary.RunSummary:
    return summary.summarize_run("it", found.rate, found.lifelines, SLO)


def test_the_same_seed_gives_the_same_summary_and_another_one_another(setup: Setup) -> None:
    other = replace(setup, offer=replace(setup.offer, seed=4))
    assert summed(run(setup, 20.0)) == summed(run(setup, 20.0)) != summed(run(other, 20.0))


def test_a_rate_that_the_device_cannot_carry_is_reported_as_such(setup: Setup) -> None:
    assert run(setup, 10.0).behind is None
    too_much = run(setup, 2000.0)
    assert too_much.behind is not None
    assert "cannot be carried" in too_much.behind
    assert "30 requests had no first token" in too_much.behind


def test_who_is_not_done_when_the_drain_ends_is_unfinished(setup: Setup) -> None:
    found = run(replace(setup, drain_s=0.01), 2000.0)
    assert summed(found).verdicts["unfinished"] > 0
    assert len(found.lifelines) == 30


def test_warm_up_requests_count_in_no_figure(setup: Setup) -> None:
    found = run(replace(setup, offer=replace(setup.offer, warmup=10)), 20.0)
    assert len(found.lifelines) == 30
    assert found.lifelines[0].due_s == 0.0


def test_slower_steps_make_later_tokens(setup: Setup) -> None:
    slow = replace(setup, device=replace(setup.device, slower=Slower(decode=3.0, prefill=2.0, mixed=2.0)))
    before, after = (run(each, 5.0).lifelines[0] for each in (setup, slow))
    assert before.ttft_s is not None
    assert after.ttft_s is not None
    assert after.ttft_s > 1.5 * before.ttft_s
    assert min(after.gaps_s) > 2 * max(before.gaps_s)


def test_every_instance_has_its_lanes_in_the_timeline(setup: Setup) -> None:
    found = run(setup, 20.0)
    trace = json.loads((setup.directory / "timeline-20.json").read_text())
    assert set(trace["otherData"]["instances"]) == {"prefill-0", "mux-1"}
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "C", "i"}
    assert any(sample.prefill_units for sample in found.units)


def test_rates_on_several_cores_are_those_on_one(setup: Setup) -> None:
    progress = Progress(60.0, Console(quiet=True))
    one, two = ([summed(each) for each in runs(setup, [20.0, 40.0], progress, cores)] for cores in (1, 2))
    assert one == two
    assert [each.rate for each in one] == [20.0, 40.0]


def simulate(path: Path, *arguments: str, settings: object = MUX) -> int:
    document = {"applications": [{"import_path": "pdmux_ray.serve.app:build_app", "args": settings}]}
    (path / "it.yaml").write_text(yaml.safe_dump(document))
    try:
        return cli.main(["simulate", str(path / "it.yaml"), *arguments, "--out", str(path / "out")])
    except SystemExit as stop:
        return int(str(stop.code))


def trace(path: Path, requests: int, apart_ms: int) -> str:
    lines = [{"timestamp": i * apart_ms, "input_length": 40, "output_length": 4, "hash_ids": [i]} for i in range(requests)]
    (path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return f"mooncake:{path / 't.jsonl'}"


def test_it_leaves_what_bench_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--gpu", "H200", "--trace", trace(tmp_path, 21, 100), "--scale-rate", "1,2", *GOOD[-2:]) == 0
    names = {"summary.json", "requests.jsonl", "report.html", "units.jsonl"}
    assert names | {"timeline-10.5.json", "timeline-21.json"} == {path.name for path in (tmp_path / "out").iterdir()}
    told = capsys.readouterr()
    assert "goodput: at least 21.0 requests/s" in told.out
    assert "1 mux of Llama-3.1-8B on H200 SXM" in told.err
    found = summary.read(tmp_path / "out")
    assert [each.requests for each in found.runs] == [21, 21]
    assert found.conditions["link"] == "50 GB/s between two instances"
    assert cli.main(["bench", "report", str(tmp_path / "out")]) == 0
    assert simulate(tmp_path, "--gpu", "H200", *GOOD) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GOOD, "names no profile"),
        (("--gpu", "H200", *GOOD[2:]), "--workload or --trace is missing"),
        (("--gpu", "H200", *GOOD[:-2]), "--slo is missing"),
        (("--gpu", "H200", *GOOD[:2], *GOOD[4:]), "--rates is missing"),
        (("--gpu", "B300", *GOOD), "invalid choice"),
        (("--gpu", "H200", "--profile", "p.json", *GOOD), "not allowed with"),
        (("--gpu", "A100", "--model-shape", "codellama-34b", "--set", "engine.kv_cache_gib=1e-6", *GOOD), "is not from a page"),
        (("--gpu", "H200", "--set", "engine.kv_cache_gib=500", *GOOD), "has room for"),
        (("--gpu", "A100", "--model-shape", "llama-70b", *GOOD), "more (--tp)"),
        (("--gpu", "A100", "--tp", "3", *GOOD), "3 GPUs cannot share them out"),
        (("--gpu", "A100", "--assume", "x=1", *GOOD), "no such assumption"),
        (("--profile", "p.json", "--tp", "2", *GOOD), "go with --gpu"),
        (("--profile", "missing.json", *GOOD), "cannot read the profile"),
        (("--gpu", "H200", "--slower", "fast", *GOOD), "--slower 'fast' is not understood"),
        (("--gpu", "H200", "--slower", "prefil=2", *GOOD), "--slower 'prefil=2' is not understood"),
        (("--gpu", "H200", "--slower", "0", *GOOD), "--slower '0' is not understood"),
        (("--gpu", "H200", "--spread", "-1", *GOOD), "a number from 0 to 1"),
        (("--gpu", "H200", "--scale-rate", "2", *GOOD[:2], *GOOD[4:]), "--scale-rate multiplies"),
        (("--gpu", "H200", "--trace", "fixed:8,8", *GOOD[2:]), "--trace takes mooncake:FILE or azure:FILE"),
        (("--gpu", "H200", "--trace", "azure:missing", *GOOD[:2]), "not allowed with"),
        (("--gpu", "H200", *GOOD, "--set", "engine.multiplex.itl_s=null"), "engine.multiplex.itl_s is missing"),
        (("--gpu", "H200", *GOOD, "--set", "engine.context_length=999999"), "the model is made for 131072 tokens"),
        (("--gpu", "H200", *GOOD, "--set", "engine.mod=auto"), "did you mean 'mode'"),
        (("--gpu", "H200", *GOOD, "--concurrency", "4"), "unrecognized arguments"),
        (("--gpu", "H200", *GOOD[:-1], "ttft=5x", "--set", "engine.context_length=16"), "maximum context length is 16 tokens"),
    ],
)
def test_what_cannot_be_simulated_is_told_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    settings = {**MUX, "model": str(model(tmp_path / "model"))}
    assert simulate(tmp_path, *arguments, settings=settings) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_goodput_is_per_gpu_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--gpu", "H200", "--model-shape", "llama-70b", "--tp", "4", "--assume", "link=0.5", *GOOD) == 0
    assert "1 mux of Llama-3.1-70B on 4 x H200 SXM" in capsys.readouterr().err
    found = summary.read(tmp_path / "out")
    assert found.devices == 4
    assert (found.conditions["link"], found.conditions["assumed"]) == ("100 GB/s between two instances", "link=0.5")


def test_texts_are_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "Once upon a time"}\n' * 12)
    assert simulate(tmp_path, "--gpu", "H200", "--workload", f"prompts:{tmp_path / 'texts.jsonl'}", *GOOD[2:]) == 2
    assert "Texts cannot be simulated" in capsys.readouterr().err


def test_the_configuration_s_own_profile_is_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model(tmp_path / "model")
    (tmp_path / "p.json").write_text(profile(directory).model_dump_json())
    engine = {"mode": "auto", "multiplex": {"itl_s": 0.02, "profile": "p.json"}, "threads": 7}
    assert simulate(tmp_path, *GOOD, settings={"model": str(directory), "engine": engine}) == 2
    assert "profiled 132, configured 7" in capsys.readouterr().err


def test_the_help_names_every_gpu_and_shape() -> None:
    arguments = ["simulate", "c.yaml", "--out", "out"]
    for name in GPUS:
        assert cli.parser().parse_args([*arguments, "--gpu", name]).gpu == name
    for name in SHAPES:
        assert cli.parser().parse_args([*arguments, "--model-shape", name]).model_shape == name
    assert tuple(Slower.__dataclass_fields__) == KINDS


def test_a_spread_beside_a_timeline_is_refused(tmp_path: Path) -> None:
    found = Profiled(device(), 2048, 0.1)
    with pytest.raises(ConfigError, match="exclude each other"):
        as_served(found, "1", [tmp_path / "served.json"], 0.2)


def test_a_timeline_beside_costs_that_no_server_corrects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="corrects a profile"):
        as_served(Profiled(device(), 2048, 0.1), "1", [tmp_path / "served.json"], None)
