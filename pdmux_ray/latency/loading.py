"""What an instance predicts with: the profile that its configuration names, checked, and corrected while it is used."""

from __future__ import annotations

from pathlib import Path

from pdmux_ray.engine.runner import Runner
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.identity import Identified, identify
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.profile import load, read


def load_costs(path: Path, model_dir: Path, runner: Runner) -> CorrectedCosts:
    """Raises ConfigError when the file is no sound profile, ProfileMismatchError when it is one of something else."""
    if not isinstance(runner, Identified):
        raise ConfigError(f"the profile {path} cannot be used: this device does not say what it is")
    return CorrectedCosts(load(path, identify(model_dir, runner)).costs())


def read_costs(path: Path) -> FittedCosts:
    """For somebody who has not the device: whoever has it checks whose profile it is. Raises ConfigError as above."""
    return read(path).costs()
