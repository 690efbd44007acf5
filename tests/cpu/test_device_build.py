"""Choosing a device, building its kernels, and doing without a compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_cases import Shape

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.native import NativeUnavailableError, load_library
from pdmux_ray.device.cpu.ops import CpuOps, TorchOps, make_ops
from pdmux_ray.device.kv_pool import allocate_on_cpu, layout_for
from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.errors import ConfigError

pytestmark = pytest.mark.cpu


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that has not built the kernels yet."""
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def test_the_fake_device_never_imports_torch() -> None:
    code = (
        "import sys; from pdmux_ray.config import EngineConfig; from pdmux_ray.device.base import build_runner\n"
        "runner = build_runner(None, EngineConfig(device='fake')); runner.close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_fake_device_takes_as_many_decode_steps_at_once_as_it_is_told() -> None:
    config = EngineConfig.model_validate({"device": "fake", "mode": "auto", "fake": {"most_steps": 3}})
    runner = build_runner(None, config)
    assert isinstance(runner, LaneRunner)
    assert runner.most_steps == 3


def test_a_real_device_without_a_model_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a model directory"):
        build_runner(None, EngineConfig(device="cpu"))


def test_the_kernels_are_built_once_and_found_again(empty_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_library()
    assert "compiling the CPU kernels" in capfd.readouterr().err
    (library,) = (empty_cache / "kernels").glob("*.so")
    built = library.stat().st_mtime_ns
    load_library.cache_clear()
    load_library()
    assert capfd.readouterr().err == ""
    assert library.stat().st_mtime_ns == built


def test_the_process_has_one_openmp_runtime() -> None:
    load_library()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    runtimes = {line.split()[-1] for line in maps if "/libgomp" in line or "/libiomp" in line or "/libomp" in line}
    assert len({Path(path).resolve() for path in runtimes}) == 1


def test_without_a_compiler_the_answers_are_the_same_and_a_warning_says_what_to_install(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Shape(9, 3, 64, (1, 70, 33), (17, 150, 49)).case(torch.float32)
    fast, fast_pool = case.run(CpuOps)
    load_library.cache_clear()
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(RuntimeWarning, match="apt install g\\+\\+"):
        ops = make_ops(case.pool.clone())
    assert type(ops) is TorchOps
    slow, slow_pool = case.run(TorchOps)
    torch.testing.assert_close(slow, fast, atol=5e-6, rtol=0)
    torch.testing.assert_close(slow_pool, fast_pool, atol=5e-6, rtol=0, equal_nan=True)


def test_a_compiler_that_fails_is_named_with_what_it_said(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = empty_cache / "c++"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailableError, match="no such header"):
        load_library()
    assert not list((empty_cache / "kernels").glob("*.so"))


def test_a_head_that_the_kernels_do_not_take_falls_back_to_torch() -> None:
    with pytest.warns(RuntimeWarning, match="multiple of 16"):
        assert type(make_ops(torch.zeros(1, 2, 1, 1, 16, 24))) is TorchOps


def test_the_pool_has_as_many_pages_as_fit() -> None:
    layout = layout_for(0.25, layers=30, kv_heads=3, head_dim=64, page_size=16, dtype=torch.bfloat16)
    assert layout.shape == (30, 2, layout.pages, 3, 16, 64)
    assert layout.total_bytes == layout.pages * 30 * 2 * 3 * 16 * 64 * 2
    assert layout.total_bytes <= 2**28 < layout.total_bytes // layout.pages * (layout.pages + 1)
    pool = allocate_on_cpu(layout, torch.bfloat16)
    assert pool.shape == layout.shape
    assert pool.dtype == torch.bfloat16
    assert not pool[:, :, :2].any()


def test_a_pool_too_small_for_a_page_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="does not hold one page"):
        layout_for(0.0001, layers=30, kv_heads=3, head_dim=64, page_size=16, dtype=torch.float32)
