"""Random attention steps over a random paged pool, for the tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, Ops
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.rope import Rope, RopeSpec

LAYER, LAYERS = 1, 2


@dataclass
class Case:
    """`pool` is what lies in the pages before the step; `qkv` the step's input."""

    pool: Tensor
    qkv: Tensor
    batch: AttentionBatch
    spec: AttentionSpec

    def run(self, make_ops: type) -> tuple[Tensor, Tensor]:
        """(attention output, pool afterwards)."""
        pool = self.pool.clone()
        ops: Ops = make_ops(pool)
        return ops.qkv_to_attention(LAYER, self.qkv.clone(), self.batch, self.spec), pool

    def reference(self) -> tuple[Tensor, Tensor]:
        """The same in float32, by the reference operations."""
        norms = {name: None if norm is None else norm.float() for name, norm in self._norms().items()}
        spec = replace(self.spec, **norms)
        return Case(self.pool.float(), self.qkv.float(), self.batch, spec).run(ReferenceOps)

    def _norms(self) -> dict[str, Tensor | None]:
        return {"q_norm": self.spec.q_norm, "k_norm": self.spec.k_norm}

    def only(self, sequence: int, queries: range | None = None) -> Case:
        """The step of one sequence alone, or of some of its queries (the KV of earlier ones must be in the pool)."""
        first, last = self.batch.query_starts[sequence : sequence + 2].tolist()
        queries = queries or range(last - first)
        rows = slice(first + queries.start, first + queries.stop)
        context = int(self.batch.context_lengths[sequence]) - (last - first) + queries.stop
        batch = AttentionBatch(
            positions=self.batch.positions[rows],
            slots=self.batch.slots[rows],
            query_starts=torch.tensor([0, len(queries)], dtype=torch.int32),
            context_lengths=torch.tensor([context], dtype=torch.int32),
            page_table=self.batch.page_table[sequence : sequence + 1],
        )
        return Case(self.pool, self.qkv[rows], batch, self.spec)


@dataclass(frozen=True)
class Shape:
    """`queries` and `contexts`: one entry a sequence of the step."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    window: int | None = None
    qk_norm: bool = False
    page_size: int = 16

    def case(self, dtype: torch.dtype, seed: int = 0) -> Case:
        rng = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(dtype)

        counts = [-(-context // self.page_size) for context in self.contexts]
        pages = torch.randperm(sum(counts) + 5, generator=rng)
        pool = noise(LAYERS, 2, len(pages), self.kv_heads, self.page_size, self.head_dim)
        pool[:, :, pages[sum(counts) :]] = torch.nan  # pages of nobody
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        positions, slots, at = [], [], 0
        for row, (query, context, count) in enumerate(zip(self.queries, self.contexts, counts, strict=True)):
            own = pages[at : at + count]
            table[row, :count], at = own, at + count
            place = torch.arange(context - query, context)
            positions.append(place)
            slots.append(own[place // self.page_size] * self.page_size + place % self.page_size)
            tail = context % self.page_size
            if tail:
                pool[:, :, own[-1], :, tail:] = torch.nan  # slots past the sequence's last token
        batch = AttentionBatch(
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            query_starts=torch.tensor([0, *self.queries]).cumsum(0).int(),
            context_lengths=torch.tensor(self.contexts, dtype=torch.int32),
            page_table=table,
        )
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        norms = [noise(self.head_dim) if self.qk_norm else None for _ in range(2)]
        spec = AttentionSpec(
            self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window, _rope(self.head_dim), *norms
        )
        return Case(pool, noise(sum(self.queries), width), batch, spec)


def _rope(head_dim: int) -> Rope:
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return Rope(RopeSpec("default", tuple(inv_freq.tolist())), 4096)
