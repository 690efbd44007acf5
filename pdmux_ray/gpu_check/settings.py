"""The engine's configuration as plain dataclasses: `pdmux_ray.config` needs pydantic, which a GPU machine may lack.

Field by field the same as `EngineConfig`, `MultiplexConfig` and `CudaConfig`, whose defaults these are; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.types import Mode

if TYPE_CHECKING:
    from pdmux_ray.config import EngineConfig, MultiplexConfig


@dataclass(frozen=True, slots=True)
class Multiplex:
    """See `pdmux_ray.config.MultiplexConfig`."""

    policy: str = "slo"
    ttft_s: float | None = None
    ttft_s_per_token: float = 0.0
    itl_s: float | None = None
    admission: str = "queue"
    decode_units: int | None = None
    block_layers: int | None = None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class Cuda:
    """See `pdmux_ray.config.CudaConfig`."""

    index: int = 0
    splits: tuple[tuple[int, int], ...] | None = None
    decode_buckets: tuple[int, ...] | None = None
    look_ahead: int = 4
    kv_share: float = 0.9
    prefill_attention: str = "triton"


@dataclass(frozen=True, slots=True)
class Settings:
    """See `pdmux_ray.config.EngineConfig`; what a device and an engine read of it."""

    device: str = "auto"
    dtype: str = "auto"
    load: str = "weights"
    mode: Mode = Mode.PREFILL_FIRST
    multiplex: Multiplex = Multiplex()
    chunk_tokens: int = 512
    max_prefill_tokens: int = 2048
    max_batch: int = 64
    max_waiting: int = 256
    context_length: int | None = None
    page_size: int = 16
    kv_cache_gib: float | None = None
    prefix_cache: bool = True
    stall_timeout_s: float = 60.0
    cuda: Cuda = Cuda()

    @property
    def config(self) -> EngineConfig:
        """What takes a configuration reads these attributes and no others."""
        return cast("EngineConfig", self)

    def limits(self, context_length: int, vocab_size: int) -> EngineLimits:
        """Of an engine whose model has no end token."""
        return EngineLimits(
            context_length=self.context_length or context_length,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(),
            mode=self.mode,
            chunk_tokens=self.chunk_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_batch=self.max_batch,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            stall_timeout_s=self.stall_timeout_s,
            multiplex=cast("MultiplexConfig", self.multiplex),
        )
