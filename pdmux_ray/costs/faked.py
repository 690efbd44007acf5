"""What `engine.device: fake` keeps the time of: a GPU of published figures, or the constants of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.config import FakeConfig
from pdmux_ray.costs.gpu import GPUS, SHAPES, device_model
from pdmux_ray.engine.fake_runner import linear_costs
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Split


@dataclass(frozen=True, slots=True)
class Faked:
    """`splits`: the disjoint ones; None: any."""

    costs: CostModel
    layers: int
    units: int
    splits: Sequence[Split] | None


def faked(fake: FakeConfig) -> Faked:
    if fake.gpu is None:
        costs = linear_costs(fake.step_s, fake.prefill_s_per_token, fake.layers, fake.units)
        return Faked(costs, fake.layers, fake.units, None)
    device = device_model(GPUS[fake.gpu], SHAPES[fake.shape])
    return Faked(device.costs, device.layout.layers, device.units, device.splits)
