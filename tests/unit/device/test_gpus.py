"""Whether there is a GPU, and who is told when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.gpus import has_gpu, require_gpu, wants_gpu
from pdmux_ray.errors import ConfigError


def test_a_gpu_is_there_when_the_driver_has_made_its_file(tmp_path: Path) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)


def test_only_a_device_that_needs_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    for device in ("auto", "cpu", "fake"):
        require_gpu(EngineConfig(device=device), tmp_path)
    with pytest.raises(ConfigError, match=r"configs/cpu-mux\.yaml"):
        require_gpu(EngineConfig(device="cuda"), tmp_path)


def test_an_instance_is_given_a_gpu_when_it_will_use_one() -> None:
    wanted = {device: wants_gpu(EngineConfig(device=device)) for device in ("cuda", "cpu", "fake", "auto")}
    assert wanted == {"cuda": True, "cpu": False, "fake": False, "auto": has_gpu()}
