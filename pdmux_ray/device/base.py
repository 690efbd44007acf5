"""Which device runs an instance."""

from __future__ import annotations

from pathlib import Path

from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.engine.runner import Runner
from pdmux_ray.errors import ConfigError


def build_runner(model_dir: Path | None, config: EngineConfig) -> Runner:
    """The runner that `config.device` names; "auto" is the CPU. The fake device needs no `model_dir` and never imports torch.

    Raises ConfigError, UnsupportedModelError, WeightsError.
    """
    if config.device == "fake":
        from pdmux_ray.engine.fake_runner import FakeRunner

        fake = config.fake
        return FakeRunner(fake.pages, config.page_size, fake.step_s, fake.prefill_s_per_token, WallClock())
    if model_dir is None:
        raise ConfigError(f"device: {config.device} needs a model directory; only device: fake runs without one")
    from pdmux_ray.device.cpu.runner import CpuRunner

    return CpuRunner(model_dir, config)
