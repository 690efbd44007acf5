"""How much of a GPU's memory the KV pool gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from pdmux_ray.device.kv_pool import layout_for
from pdmux_ray.errors import ConfigError
from pdmux_ray.model.config import DecoderConfig

if TYPE_CHECKING:  # it needs pydantic, which a machine that only computes may lack
    from pdmux_ray.config import EngineConfig

_GIB = 2**30
SPARE_PAGES = 1  # the pool's last: rows of a decode step that are nobody's write there


def pool_layout(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype, free_bytes: int) -> KVLayout:
    """Of the whole pool, the spare page included. `free_bytes`: of device memory, when all else is there.

    Raises ConfigError when what is asked for is not free, or does not hold a page.
    """
    free_gib = free_bytes / _GIB
    wanted_gib = config.kv_cache_gib or config.cuda.kv_share * max(free_gib, 0.0)
    if wanted_gib > free_gib:
        raise ConfigError(
            f"engine.kv_cache_gib is {wanted_gib:.3g}, but beside weights, buffers and graphs {max(free_gib, 0):.3g} GiB are "
            "free. Lower it, leave it out, or lower engine.max_prefill_tokens, engine.context_length or engine.max_batch."
        )
    layout = layout_for(wanted_gib, model.layers, model.kv_heads, model.head_dim, config.page_size, dtype)
    if layout.pages <= SPARE_PAGES:
        raise ConfigError(f"a KV pool of {wanted_gib:.3g} GiB holds no page beside the spare one: raise engine.kv_cache_gib")
    return layout


def smallest_layout(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype) -> KVLayout:
    """Of a pool to warm up with: one page beside the spare one."""
    return KVLayout(model.layers, 1 + SPARE_PAGES, model.kv_heads, config.page_size, model.head_dim, dtype.itemsize)


def allocate(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed pool of `layout.shape`: what is never written is finite all the same."""
    return torch.zeros(layout.shape, dtype=dtype, device=device)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU that multiplies it natively, float16 on older ones, float32 without one."""
    if name != "auto":
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        return dtypes[name]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
