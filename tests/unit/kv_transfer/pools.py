"""The bytes of a pool, by what they are of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_transfer.layout import KVLayout


def pool_view(memory: NDArray[np.uint8], layout: KVLayout) -> NDArray[np.uint8]:
    """[layer, key or value, page, head, slot, byte of a head's vector]: the same memory."""
    layers, two, pages, heads, slots, dim = layout.shape
    return memory.reshape(layers, two, pages, heads, slots, dim * layout.dtype_bytes)
