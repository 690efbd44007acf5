"""How the KV pool of an instance lies in memory. Pure arithmetic; stdlib only.

    pool[layer][0 = key, 1 = value][page][kv_head][slot in page][head_dim]

A page of one layer's keys (or values) is contiguous, and so is each head's part of it: a transfer between different
tensor-parallel degrees moves head ranges without gathering.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a paged KV pool. `dtype_bytes` is the size of one element."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int  # tokens a page
    head_dim: int
    dtype_bytes: int
    first_head: int = 0  # which of the model's KV heads `kv_head` 0 is: tensor-parallel instances hold a range each

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(layers, 2, pages, kv_heads, page_size, head_dim)."""
        return (self.layers, 2, self.pages, self.kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer's keys (or values): the contiguous run."""
        return self.kv_heads * self.page_size * self.head_dim * self.dtype_bytes

    @property
    def total_bytes(self) -> int:
        return self.layers * 2 * self.pages * self.page_bytes

    def filling(self, total_bytes: float) -> KVLayout:
        """The same with as many pages as fit into so many bytes; maybe none."""
        return replace(self, pages=int(total_bytes / (self.layers * 2 * self.page_bytes)))
