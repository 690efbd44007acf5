"""What an instance predicts with: the profile that its configuration names, checked, and corrected while it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdmux_ray.engine.runner import Runner
from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.correction import BOUND_FACTOR, PREDICTION_FACTOR, CorrectedCosts, ToldCosts
from pdmux_ray.latency.identity import Identified, identify
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.profile import load, read
from pdmux_ray.policy.views import CostModel


def load_costs(path: Path, model_dir: Path, runner: Runner) -> CorrectedCosts:
    """Raises ConfigError when the file is no sound profile, ProfileMismatchError when it is one of something else."""
    if not isinstance(runner, Identified):
        raise ConfigError(f"the profile {path} cannot be used: this device does not say what it is")
    return CorrectedCosts(load(path, identify(model_dir, runner)).costs())


def read_costs(path: Path) -> FittedCosts:
    """For somebody who has not the device: whoever has it checks whose profile it is. Raises ConfigError as above."""
    return read(path).costs()


def as_told(base: CostModel, figures: Mapping[str, float | Mapping[str, float]]) -> CostModel:
    """With the corrections of an instance that has told its figures; `base` when there are none."""
    prediction, bound = figures.get(PREDICTION_FACTOR), figures.get(BOUND_FACTOR)
    return ToldCosts(base, prediction, bound) if isinstance(prediction, Mapping) and isinstance(bound, Mapping) else base
