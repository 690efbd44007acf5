"""What an engine may do: resolved numbers, no "auto". Defaults of what can be configured stand in `pdmux_ray.config`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmux_ray.engine.runner import LaneRunner, Runner
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.admission import TtftObjective
from pdmux_ray.policy.batching import BatchLimits
from pdmux_ray.types import ONE_PASS_MODES, Mode, ModelFacts, Split

if TYPE_CHECKING:  # it needs pydantic, which a machine that only computes may lack
    from pdmux_ray.config import EngineConfig, MultiplexConfig


def _default_multiplex() -> MultiplexConfig:
    from pdmux_ray.config import MultiplexConfig

    return MultiplexConfig()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Lengths in tokens; every number is at least 1."""

    context_length: int  # prompt and generated tokens together; lowered to what the KV pool holds when that is less
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    eos_token_ids: frozenset[int]
    mode: Mode
    chunk_tokens: int
    max_prefill_tokens: int
    max_batch: int  # requests that hold pages at once
    max_waiting: int  # requests that wait; one more is refused, also in a burst that comes between two steps of an idle engine
    prefix_cache: bool
    stall_timeout_s: float  # a step that takes longer makes the engine unhealthy
    multiplex: MultiplexConfig = field(default_factory=_default_multiplex)  # of the modes with lanes

    @property
    def has_lanes(self) -> bool:
        return self.mode not in ONE_PASS_MODES

    @property
    def ttft_objective(self) -> TtftObjective:
        """Infinite when none is configured."""
        ttft_s = self.multiplex.ttft_s
        return TtftObjective(math.inf if ttft_s is None else ttft_s, self.multiplex.ttft_s_per_token)

    def batch_limits(self) -> BatchLimits:
        return BatchLimits(self.mode, self.chunk_tokens, self.max_prefill_tokens, self.max_batch)


def with_lanes(runner: Runner | None, mode: Mode) -> LaneRunner:
    """The runner, when its device can do this mode, one that is not in one pass. Raises ConfigError: the only place that says
    which modes need two units."""
    one_pass = " or ".join(mode.value for mode in ONE_PASS_MODES)
    if not isinstance(runner, LaneRunner):
        raise ConfigError(f"engine.mode: {mode.value} needs a device with lanes, which this one has not. Use {one_pass}.")
    if not runner.splits and mode in (Mode.SPLIT, Mode.CAPPED):
        raise ConfigError(
            f"engine.mode: {mode.value} needs two units (cores) at least, and this device has {runner.units}: raise "
            f"engine.threads, give the process more cores, or use auto, time_shared, {one_pass}."
        )
    return runner


_ONLY_WITH = {"table": "sglang", "decode_units": "fixed", "block_layers": "fixed"}  # key of MultiplexConfig -> its policy


def _check_multiplex(settings: MultiplexConfig, mode: Mode, splits: Sequence[Split]) -> None:
    """Raises ConfigError."""
    for key, policy in _ONLY_WITH.items():
        if getattr(settings, key) is not None and settings.policy != policy:
            raise ConfigError(
                f"engine.multiplex.{key} goes with policy {policy}, but the policy is {settings.policy}: it would do nothing. "
                f"Leave it out, or use policy {policy}."
            )
    if settings.policy != "slo" and mode is Mode.AUTO:
        raise ConfigError(
            f"engine.mode: auto compares predicted times, but engine.multiplex.policy {settings.policy} looks at none. Use "
            "policy slo, or mode split, capped or time_shared."
        )
    if settings.policy == "slo" and settings.itl_s is None:
        raise ConfigError(
            "engine.multiplex.itl_s is missing: policy slo keeps the gap between two tokens under it. Set it (seconds), or use "
            "policy fixed or sglang."
        )
    if settings.admission == "refuse" and settings.ttft_s is None:
        raise ConfigError(
            "engine.multiplex.ttft_s is missing: admission refuse turns away whose first token would come later. Set it "
            "(seconds), or use admission queue."
        )
    possible = [split.decode_units for split in splits]
    if settings.decode_units is not None and mode is not Mode.TIME_SHARED and settings.decode_units not in possible:
        raise ConfigError(
            f"engine.multiplex.decode_units is {settings.decode_units}, but a split of this device can give decode "
            f"{', '.join(map(str, possible))}. Use one of them, or leave it out for half."
        )


def resolve_limits(config: EngineConfig, facts: ModelFacts, runner: Runner | None = None) -> EngineLimits:
    """The configuration's limits for a model on a device (None: one without lanes).

    Raises ConfigError when they ask for more context than the model has, or for a mode that the device or a missing setting
    does not allow.
    """
    if config.context_length is not None and config.context_length > facts.context_length:
        raise ConfigError(
            f"engine.context_length is {config.context_length}, but the model is made for {facts.context_length} tokens. "
            "Lower it, or leave it out."
        )
    if config.mode not in ONE_PASS_MODES:
        _check_multiplex(config.multiplex, config.mode, with_lanes(runner, config.mode).splits)
    elif config.multiplex.admission == "refuse":
        raise ConfigError(
            f"engine.multiplex.admission: refuse predicts, which mode {config.mode.value} does not. Use admission queue, or a "
            "mode with lanes."
        )
    return EngineLimits(
        context_length=config.context_length or facts.context_length,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        mode=config.mode,
        chunk_tokens=config.chunk_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        max_batch=config.max_batch,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache and facts.prefixes_are_shareable,
        stall_timeout_s=config.stall_timeout_s,
        multiplex=config.multiplex,
    )
