"""Which policy plans the steps of an engine whose device has lanes."""

from __future__ import annotations

import math

from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.lanes import Planner
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.engine.sglang_table import load_rule
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits, UnitRule
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.policy.sglang import CORES
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Mode, Split


def make_planner(limits: EngineLimits, device: LaneRunner, costs: CostModel | None) -> Planner:
    """`policy.multiplexing` with the limits' settings. Raises ConfigError when policy slo has no latency model."""
    settings = limits.multiplex
    if costs is None and isinstance(device, FakeRunner):
        costs = device.costs  # it takes what they say
    if settings.policy == "slo" and costs is None:
        raise ConfigError(
            "engine.multiplex.profile is missing: policy slo predicts what steps take. Run `pdmux profile CONFIG --out FILE` "
            "and name the file, or use policy fixed or sglang."
        )
    lane_limits = LaneLimits(
        mode=limits.mode,
        max_batch=limits.max_batch,
        max_prefill_tokens=limits.max_prefill_tokens,
        itl_s=math.inf if settings.itl_s is None else settings.itl_s,
        rule=_rule(limits, device),
        chunk_tokens=limits.chunk_tokens,
    )
    return lambda view: plan_lanes(view, lane_limits, costs)


def _rule(limits: EngineLimits, device: LaneRunner) -> UnitRule | None:
    settings = limits.multiplex
    if settings.policy == "slo":
        return None
    if settings.policy == "sglang":
        return load_rule(settings.table, device.units, CORES)
    return FixedRule(_fixed_split(limits.mode, device.units, settings.decode_units), settings.block_layers)


def _fixed_split(mode: Mode, units: int, decode_units: int | None) -> Split:
    """`decode_units`: None for half."""
    if mode is Mode.TIME_SHARED:
        return Split(units, units)
    prefill_units = units - (decode_units or units // 2)
    return Split(prefill_units, units if mode is Mode.CAPPED else units - prefill_units)
