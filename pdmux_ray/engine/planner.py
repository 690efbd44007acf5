"""Which policy plans the steps of an engine whose device has lanes, and which requests it takes in."""

from __future__ import annotations

import math

from pdmux_ray.engine.admission import Admitter
from pdmux_ray.engine.lanes import LaneScheduler, Planner
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.engine.sglang_table import load_rule
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.lane_limits import FixedRule, LaneLimits, UnitRule
from pdmux_ray.policy.multiplexing import plan_lanes
from pdmux_ray.policy.sglang import Grain, PublishedRule
from pdmux_ray.policy.views import CostModel
from pdmux_ray.types import Mode, Split


def make_planner(limits: LaneLimits, costs: CostModel | None) -> Planner:
    """`policy.multiplexing`. Raises ConfigError when policy slo has no latency model."""
    if limits.rule is None and costs is None:
        raise _no_profile("policy slo predicts what steps take", "use policy fixed or sglang")
    return lambda view: plan_lanes(view, limits, costs)


def make_admitter(lanes: LaneScheduler, limits: EngineLimits, of_steps: LaneLimits, costs: CostModel | None) -> Admitter | None:
    """None when whoever comes is queued. Raises ConfigError without a latency model."""
    if limits.multiplex.admission == "queue":
        return None
    if costs is None:
        raise _no_profile("admission refuse predicts when a first token comes", "use admission queue")
    return Admitter(lanes, of_steps, costs, limits.ttft_objective)


def _no_profile(why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"engine.multiplex.profile is missing: {why}. Run `pdmux profile CONFIG --out FILE` and name the file, or {instead}."
    )


def lane_limits(limits: EngineLimits, device: LaneRunner) -> LaneLimits:
    """Raises ConfigError when a rule does not fit the device."""
    settings = limits.multiplex
    return LaneLimits(
        mode=limits.mode,
        max_batch=limits.max_batch,
        max_prefill_tokens=limits.max_prefill_tokens,
        itl_s=math.inf if settings.itl_s is None else settings.itl_s,
        rule=_rule(limits, device),
        most_steps=device.most_steps,
    )


def _rule(limits: EngineLimits, device: LaneRunner) -> UnitRule | None:
    settings = limits.multiplex
    if settings.policy == "slo":
        return None
    if settings.policy == "sglang":
        return _published(settings.table, device)
    return FixedRule(_fixed_split(limits.mode, device, settings.decode_units), settings.block_layers)


def _published(table: str | None, device: LaneRunner) -> PublishedRule:
    """Of the splits that the device has; a GPU is divided once, into few."""
    part = max(
        math.gcd(*(split.prefill_units for split in device.splits)),
        math.gcd(*(split.decode_units for split in device.splits)),
        1,
    )
    rule = load_rule(table, device.units, Grain(part, part))
    if not set(rule.splits) <= set(device.splits):
        asked = ", ".join(f"[{split.prefill_units}, {split.decode_units}]" for split in rule.splits)
        raise ConfigError(
            "engine.multiplex.policy sglang: the table's splits are not those that the device is divided into. On a GPU set "
            f"engine.cuda.splits: [{asked}]"
        )
    return rule


def _fixed_split(mode: Mode, device: LaneRunner, decode_units: int | None) -> Split:
    """`decode_units`: None for half, or the next best thing."""
    units = device.units
    if mode is Mode.TIME_SHARED:
        return Split(units, units)
    wanted = units / 2 if decode_units is None else decode_units
    split = min(device.splits, key=lambda split: abs(split.decode_units - wanted))
    return Split(split.prefill_units, units) if mode is Mode.CAPPED else split
