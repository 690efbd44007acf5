"""What an engine may do: resolved numbers, no "auto", no defaults (those stand in `pdmux_ray.config`)."""

from __future__ import annotations

from dataclasses import dataclass

from pdmux_ray.config import EngineConfig
from pdmux_ray.errors import ConfigError
from pdmux_ray.policy.batching import BatchLimits
from pdmux_ray.types import ONE_PASS_MODES, Mode, ModelFacts


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

    def batch_limits(self) -> BatchLimits:
        return BatchLimits(self.mode, self.chunk_tokens, self.max_prefill_tokens, self.max_batch)


def resolve_limits(config: EngineConfig, facts: ModelFacts) -> EngineLimits:
    """The configuration's limits for a model. Raises ConfigError when they ask for more context than the model has."""
    if config.context_length is not None and config.context_length > facts.context_length:
        raise ConfigError(
            f"engine.context_length is {config.context_length}, but the model is made for {facts.context_length} tokens. "
            "Lower it, or leave it out."
        )
    if config.mode not in ONE_PASS_MODES:
        raise ConfigError(f"engine.mode: {config.mode.value} needs a device with lanes. Use prefill_first or chunked.")
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
    )
