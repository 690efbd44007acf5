"""What Triton's compiler makes of the kernels for Hopper and Blackwell: they compile, fit, and use the matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

MODELS = {"90": (), "100": ("Llama-3.1-8B", "256")}  # of each architecture; (): all of compile_kernels.py
STACK_BYTES = 32  # of a thread, at most: the kernel that draws a token, once a step, needs 24 on Hopper
SM_SHARED_BYTES, CTA_RESERVED_BYTES, SM_REGISTERS = 228 * 1024, 1024, 65536  # of an SM of either


@pytest.fixture(scope="module", params=MODELS)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def launches(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("compile_kernels.py")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env["PYTHONPATH"] = str(Path(__file__).parents[3])
    del env["TRITON_INTERPRET"]
    command = [sys.executable, script, architecture, *MODELS[architecture]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(launches: list[dict[str, Any]]) -> None:
    assert {launch["kernel"] for launch in launches} == {
        *("_rope_kernel", "_share_kernel", "_sum_kernel", "_block_kernel"),
        *("_rms_norm_kernel", "_silu_mul_kernel", "_greedy_kernel", "_draw_kernel"),
    }


def test_no_kernel_spills_registers(launches: list[dict[str, Any]]) -> None:
    spilling = [launch for launch in launches if launch["stack"] + launch["local"] > STACK_BYTES]
    assert spilling == []


def test_two_ctas_of_a_decode_share_fit_an_sm(launches: list[dict[str, Any]]) -> None:
    for share in (launch for launch in launches if launch["kernel"] == "_share_kernel"):
        assert 2 * (share["shared_bytes"] + CTA_RESERVED_BYTES) <= SM_SHARED_BYTES
        assert 2 * share["reg"] * share["threads"] <= SM_REGISTERS


def test_prefill_uses_warpgroup_matrix_instructions_and_decode_the_smaller_ones(
    architecture: str, launches: list[dict[str, Any]]
) -> None:
    used = {(launch["kernel"], launch["rows"], *launch["matrix"]) for launch in launches if launch["matrix"]}
    large = {"90": "wgmma", "100": "tcgen05.mma"}[architecture]
    assert used == {("_block_kernel", 128, large), ("_block_kernel", 64, large), ("_share_kernel", 16, "mma.sync")}


def test_keys_and_values_are_copied_ahead_of_their_use_16_bytes_a_thread(launches: list[dict[str, Any]]) -> None:
    attention = [launch for launch in launches if launch["kernel"] in ("_block_kernel", "_share_kernel")]
    assert all(launch["copies_16_bytes"] for launch in attention)


def test_the_rehearsal_compiles_every_kernel_that_steps_of_any_mix_launch() -> None:
    """Decodes beside prefills make views that begin anywhere: a kernel for each alignment would be compiled amid requests."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("count_kernels.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["left out"] == []
    # Rope, then prefills of 64 and of 128 rows; decodes of 16, 32 and 64 sequences, each of which is two kernels.
    assert found["met"] == 1 + 2 + 2 * 3
