"""The device of an instance by name: what the commands that simulate call."""

from __future__ import annotations

from typing import Literal

from pdmux_ray.costs import gpu as roofline
from pdmux_ray.costs import silicon
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.costs.sm_share import Assumptions

Costs = Literal["roofline", "silicon"]
COSTS: tuple[Costs, ...] = ("roofline", "silicon")


def device_of(gpu: str, shape: str, *, tp: int, costs: Costs, page_size: int, assume: Assumptions) -> DeviceModel:
    """`gpu` of `GPUS`, `shape` of `SHAPES`; step times from published rates (roofline), or from a database of measured ones
    (silicon). Raises ConfigError."""
    model_of = silicon.device_model if costs == "silicon" else roofline.device_model
    return model_of(roofline.GPUS[gpu], roofline.SHAPES[shape], page_size, tp=tp, assume=assume)
