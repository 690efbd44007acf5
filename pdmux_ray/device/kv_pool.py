"""The tensor behind an instance's KV pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from pdmux_ray.errors import ConfigError


def layout_for(kv_cache_gib: float, layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> KVLayout:
    """The layout with as many pages as fit into `kv_cache_gib` GiB. Raises ConfigError when not one does."""
    one = KVLayout(layers, 1, kv_heads, page_size, head_dim, dtype.itemsize)
    layout = one.filling(kv_cache_gib * 2**30)
    if layout.pages < 1:
        raise ConfigError(
            f"kv_cache_gib: {kv_cache_gib} does not hold one page of {page_size} tokens, which takes "
            f"{one.total_bytes / 2**30:.3g} GiB; raise it"
        )
    return layout


def allocate_on_cpu(layout: KVLayout, dtype: torch.dtype) -> Tensor:
    """A zeroed pool of `layout.shape`. Written to once here, so that a machine without that much memory fails at the start."""
    return torch.empty(layout.shape, dtype=dtype).zero_()
