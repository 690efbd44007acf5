"""`pdmux gpu-check` without a GPU: every check's code runs, what is right is judged, and what is about speed is not."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdmux_ray.device.gpus import has_gpu

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]

# A GPU machine that only computes has torch, triton, transformers, cuda-bindings and numpy, and what these bring.
RUN = """
import sys

for name in "pydantic ray rich fastapi starlette aiohttp nixl prometheus_client vl_convert psutil".split():
    sys.modules[name] = None  # an import of it fails as if it were not installed
from pdmux_ray.gpu_check.__main__ import main
sys.exit(main())
"""


Dry = tuple[subprocess.CompletedProcess[str], Path]


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", RUN, "--out", str(directory), *arguments]


def report(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return document


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    directory = tmp_path_factory.mktemp("dry")
    done = subprocess.run(command(directory, "--device", "recording"), capture_output=True, text=True)
    return done, directory


def test_a_dry_run_carries_every_check_to_its_end_with_five_packages(dry: Dry) -> None:
    done, directory = dry
    found = report(directory)
    failed = [(c["name"], row) for c in found["checks"] for row in c["rows"] if row["verdict"] == "FAILED"]
    assert failed == [], done.stderr
    assert done.returncode == 0, done.stderr
    assert (found["complete"], found["failed"]) == (True, False)
    names = "machine levels graphs kernels attention sampling greedy decode prefill beside switch host headline"
    assert [check["name"] for check in found["checks"]] == names.split()


def test_a_dry_run_judges_what_is_right_and_not_how_fast(dry: Dry) -> None:
    _, directory = dry
    verdicts = {c["name"]: {row["verdict"] for row in c["rows"] if row["limit"]} for c in report(directory)["checks"]}
    for name in ("graphs", "kernels", "attention", "sampling", "greedy"):
        assert verdicts[name] == {"ok"}, name
    for name in ("decode", "prefill", "beside", "switch", "host", "headline"):
        assert verdicts[name] <= {"not judged"}, name
        assert verdicts[name], f"{name} has no limit"


def test_a_dry_run_compares_auto_with_every_size_of_chunks_on_both_loads(dry: Dry) -> None:
    done, directory = dry
    rows = [row["what"] for row in report(directory)["checks"][-1]["rows"]]
    for load in ("loogle", "sharegpt"):
        assert any(what.startswith(f"{load}, auto, ") for what in rows), done.stdout
        assert sum(": goodput" in what and what.startswith(load) for what in rows) >= 5
        assert f"{load}: goodput of auto by the best chunked" in rows


def test_each_result_is_printed_beneath_its_check_with_what_is_left(dry: Dry) -> None:
    done, _ = dry
    assert "[7/13] greedy: the same greedy tokens in every mode   (about " in done.stdout
    assert "every limit that was judged holds" in done.stdout


def test_an_interrupted_run_leaves_what_it_has_measured(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "--device", "recording"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "kernels:" not in process.stdout.readline():
        pass
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    found = report(tmp_path)
    assert not found["complete"]
    assert [check["result"] for check in found["checks"]][:3] == ["not judged", "not judged", "ok"]
    assert found["checks"][-1]["result"] == "interrupted"


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_does_without(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "configs/cpu-mux.yaml" in done.stderr
    assert "--device recording" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_check_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--device", "recording", "--only", "spede"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "no check is named spede; there are machine, levels" in done.stderr


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pdmux_ray.device.cuda.kernels.which_sm import _note

made = compile(ASTSource(fn=_note, signature={"out": "*i32"}, constexprs={}), target=GPUTarget("cuda", 90, 32))
print(made.asm["ptx"])
"""


def test_the_kernel_that_tells_its_sm_reads_the_hardwares_register() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "%smid" in done.stdout


def lab(directory: Path, **faults: Any) -> Any:
    from pdmux_ray.device.cuda.recording import RecordingStreams
    from pdmux_ray.gpu_check.lab import Lab
    from pdmux_ray.gpu_check.sizes import DRY

    return Lab(RecordingStreams(**faults), DRY, directory, dry=True, deadline_s=0.0)


def test_a_kernel_that_escapes_its_lane_fails_the_check_of_graphs(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.contexts import graphs

    assert {row.verdict for row in graphs(lab(tmp_path))} == {"ok"}
    assert {row.verdict for row in graphs(lab(tmp_path, stray={99}))} == {"FAILED"}


def test_a_model_that_does_not_fit_is_not_judged_and_says_what_it_needs(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.command import _run_checks
    from pdmux_ray.gpu_check.registry import chosen
    from pdmux_ray.gpu_check.report import Report
    from pdmux_ray.gpu_check.sizes import GPU

    shared = dataclasses.replace(lab(tmp_path), sizes=GPU, memory_bytes=24 * 2**30)
    found = Report(tmp_path, {}, lambda line: None)
    _run_checks(chosen("host", quick=False), shared, found)
    ((row,),) = [part.rows for part in found.parts]
    assert row.verdict == "not judged"
    assert row.note == "llama-3.1-8b-shape needs 41 GiB of GPU memory; this GPU has 24"


def test_a_step_of_the_engine_is_timed_by_itself_in_bursts_and_beside_a_prefill(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.steps import engine_gaps_s
    from pdmux_ray.policy.fake_costs import FakeCosts

    shared = lab(tmp_path)
    shared.sizes = dataclasses.replace(shared.sizes, decode_steps=6, prefill_tokens=48)
    assert len(engine_gaps_s(shared, 12)) >= 6
    assert len(engine_gaps_s(shared, 12, FakeCosts(units=8, layers=2, fixed_s=1e-5, weights_s=1e-5, request_s=0.0))) >= 6
    assert engine_gaps_s(shared, 12, beside=shared.splits[1])
    shared.close()


def test_a_wrong_scale_is_an_error_far_above_the_limit(tmp_path: Path) -> None:
    import torch

    from pdmux_ray.gpu_check.operations import RELATIVE_ERROR, relative_error

    right = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert RELATIVE_ERROR.holds(relative_error(right.bfloat16(), right))
    assert not RELATIVE_ERROR.holds(relative_error(1.05 * right, right))
    assert not RELATIVE_ERROR.holds(relative_error(right.where(right < 3, torch.nan), right))


def test_a_token_that_is_not_the_best_one_is_far_behind(tmp_path: Path) -> None:
    from pdmux_ray.gpu_check.greedy import BEHIND, Reference

    shared = lab(tmp_path)
    reference = Reference(shared, shared.sizes.small)
    prompt = (5, 6, 7)
    best = int(reference.logits(prompt)[-1].argmax())
    right = reference.judge(prompt, (best,))
    assert (right.behind, right.wrong) == (0.0, 0)
    worse = [reference.judge(prompt, (token,)) for token in range(shared.sizes.small.vocab_size) if token != best]
    assert sum(BEHIND.holds(one.behind) for one in worse) <= 2
    assert {one.wrong for one in worse} == {right.clear}  # where two are as good as one another no token is wrong


def test_the_registry_leaves_the_headline_out_of_a_quick_run_unless_it_is_named() -> None:
    from pdmux_ray.gpu_check.registry import chosen

    assert "headline" not in [check.name for check in chosen(None, quick=True)]
    assert [check.name for check in chosen("headline,machine", quick=True)] == ["machine", "headline"]


def test_the_checks_are_meant_to_take_no_longer_than_a_run_has() -> None:
    from pdmux_ray.gpu_check.command import TOTAL_S
    from pdmux_ray.gpu_check.registry import CHECKS

    assert sum(check.seconds for check in CHECKS) <= TOTAL_S < 300
