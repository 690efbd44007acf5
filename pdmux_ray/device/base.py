"""Which device runs an instance."""

from __future__ import annotations

import os
from pathlib import Path

from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.engine.runner import Runner
from pdmux_ray.errors import ConfigError, CudaUnavailableError

# Rounds that a CPU thread spins at the end of a parallel region before it sleeps: about ten microseconds. GNU OpenMP's default
# is milliseconds, more than a whole layer takes: as soon as anything else wants a core, threads that only wait keep it from the
# thread they wait for, and steps take ten times as long. Measured with decode steps on two cores: 1000 rounds are no faster on
# an idle machine and a third slower on a busy one; with 100, threads fall asleep within a step.
SPIN_ROUNDS = 300

# What decides how threads wait and where they run. Their number is not among them: the runner sets that.
_THREAD_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def limit_spinning() -> None:
    """Bounds how long idle CPU threads spin, unless the environment says. Has an effect only before torch is imported.

    The policy "active" lets them spin that long also when the process has more threads than cores, as it does with lanes: of
    those, all but one team sleep. GNU OpenMP would take a tenth of it then.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "active"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))


def thread_settings() -> str:
    """The OpenMP settings of this process that change how long steps take; a profile is of these."""
    return ", ".join(f"{name}={os.environ[name]}" for name in _THREAD_SETTINGS if name in os.environ)


def build_runner(model_dir: Path | None, config: EngineConfig) -> Runner:
    """The runner that `config.device` names; "auto" is a GPU where torch sees one, else the CPU. The fake device needs no
    `model_dir` and never imports torch.

    Raises ConfigError (for cuda without a GPU one that names the CPU's config), UnsupportedModelError, WeightsError.
    """
    if config.device == "fake":
        from pdmux_ray.costs.faked import faked
        from pdmux_ray.engine.fake_runner import FakeRunner

        fake, device = config.fake, faked(config.fake)
        return FakeRunner(
            fake.pages,
            config.page_size,
            fake.step_s,
            fake.prefill_s_per_token,
            WallClock(),
            layers=device.layers,
            units=device.units,
            most_steps=fake.most_steps,
            costs=device.costs if fake.gpu else None,
            splits=device.splits,
        )
    if model_dir is None:
        raise ConfigError(f"device: {config.device} needs a model directory; only device: fake runs without one")
    limit_spinning()
    if config.device == "cuda" or (config.device == "auto" and _sees_gpu()):
        return _build_on_gpu(model_dir, config)
    from pdmux_ray.device.cpu.runner import CpuRunner

    return CpuRunner(model_dir, config)


def _build_on_gpu(model_dir: Path, config: EngineConfig) -> Runner:
    if not _sees_gpu():
        raise CudaUnavailableError(
            "engine.device: cuda needs an NVIDIA GPU, its driver, and a build of torch for CUDA, and torch finds none here."
        )
    from pdmux_ray.device.cuda.runner import CudaRunner

    return CudaRunner(model_dir, config)


def _sees_gpu() -> bool:
    from pdmux_ray.device.cuda.driver import widen_queues

    widen_queues()  # which has an effect only before torch looks
    import torch

    return torch.cuda.is_available()
