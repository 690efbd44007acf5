from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdmux_ray.config import EngineConfig
from pdmux_ray.costs.profiled import Profiled, profiled, spread
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Split

from .profiles import model, profile

LINK = 1e9


def known(tmp_path: Path, device: str = "a formula", **engine: Any) -> Profiled:
    """Of a profile of the model in `tmp_path`."""
    directory = model(tmp_path / "model")
    path = tmp_path / "p.json"
    path.write_text(profile(directory, device).model_dump_json())
    return profiled(path, directory, EngineConfig.model_validate(engine), LINK)


def test_a_device_is_what_its_profile_measured_and_has_the_model_s_kv(tmp_path: Path) -> None:
    found = known(tmp_path, kv_cache_gib=2.0)
    device = found.device
    assert (device.units, device.layout.layers, found.context_length) == (132, 32, 8192)
    assert device.splits == (Split(100, 32), Split(68, 64))  # the overlapping one is none
    assert device.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert device.layout.pages == 2 * 2**30 // (16 * device.kv_bytes_per_token)
    assert "model on a formula" in device.name


def test_how_far_steps_are_from_their_prediction_is_what_held_out_records_showed(tmp_path: Path) -> None:
    assert known(tmp_path).spread == pytest.approx(0.03 / 0.6745)
    assert spread(()) == 0.0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"page_size": 32}, "engine.page_size: profiled 16, configured 32"),
        ({"threads": 4}, r"units \(engine.threads\): profiled 132, configured 4"),
        ({"dtype": "float32"}, "engine.dtype: profiled 'bfloat16', configured 'float32'"),
        ({"kv_cache_gib": 1e-6}, "does not hold one page"),
    ],
)
def test_a_configuration_that_the_profile_is_not_of_is_refused(tmp_path: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        known(tmp_path, **engine)


def test_another_model_than_the_profiled_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(profile(model(tmp_path / "one")).model_dump_json())
    with pytest.raises(ConfigError, match="model: profiled 'one, config"):
        profiled(path, model(tmp_path / "other"), EngineConfig(), LINK)


def test_the_pool_of_a_gpu_must_be_stated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_gib is missing"):
        known(tmp_path, device="NVIDIA H200")
    assert known(tmp_path, device="NVIDIA H200", kv_cache_gib=1.0).device.layout.pages > 0


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    path = tmp_path / "p.json"
    path.write_text(profile(directory).model_dump_json())
    (directory / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot read"):
        profiled(path, directory, EngineConfig(), LINK)
