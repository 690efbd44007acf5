"""The plain torch answer to ops.py, for any torch device: clear rather than fast. Faster devices are tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, LayerWeights, RunLayers

Packed = tuple[Tensor, Tensor | None]


class ReferenceOps:
    """Operations over a KV pool of `KVLayout.shape`, which it writes; page ownership is the caller's matter.

    Every result is a new tensor.
    """

    def __init__(self, kv_pool: Tensor) -> None:
        self._pool = kv_pool
        self._page_size = kv_pool.shape[4]

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return weight, bias

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        weight, bias = packed
        out = functional.linear(x, weight, bias)
        return out if residual is None else residual + out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def whole_layers(
        self, weights: Sequence[LayerWeights], specs: Sequence[AttentionSpec], norm_eps: float
    ) -> RunLayers | None:
        return None

    def qkv_to_attention(self, layer: int, qkv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        heads = qkv.view(len(qkv), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = self.rms_norm(q, spec.q_norm, spec.norm_eps), self.rms_norm(k, spec.k_norm, spec.norm_eps)
        cos, sin = spec.rope.cos_sin(batch.positions, batch.rope_lengths)
        self._write(layer, _rotate(k, cos, sin), v, batch.slots)
        return self._attend(layer, _rotate(q, cos, sin), batch, spec)

    def _write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v [T, KVH, D] into their pages."""
        pages, offsets = slots // self._page_size, slots % self._page_size
        self._pool[layer, 0][pages, :, offsets] = k
        self._pool[layer, 1][pages, :, offsets] = v

    def _attend(self, layer: int, q: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        """q [T, NH, D] -> [T, NH D], one sequence after the other."""
        starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
        out = torch.empty_like(q)
        for sequence, context in enumerate(contexts):
            rows = slice(starts[sequence], starts[sequence + 1])
            keys, values = self._read(layer, batch.page_table[sequence], context)
            out[rows] = _causal_attention(q[rows], keys, values, spec)
        return out.reshape(len(q), -1)

    def _read(self, layer: int, page_table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KVH, context, D] of one sequence."""
        pages = page_table[: -(-context // self._page_size)].long()
        both = self._pool[layer][:, pages].transpose(1, 2).flatten(2, 3)[:, :, :context]
        return both[0], both[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _causal_attention(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """q [n, NH, D], the last n of the `context` tokens of keys and values [KVH, context, D] -> [n, NH, D]; float32 inside."""
    tokens, context = len(q), keys.shape[1]
    grouped = q.float().view(tokens, spec.kv_heads, -1, spec.head_dim)  # [n, KVH, NH / KVH, D]
    scores = torch.einsum("ngqd,gcd->gqnc", grouped, keys.float()) * spec.scale
    query_at = torch.arange(context - tokens, context, device=q.device)[:, None]
    key_at = torch.arange(context, device=q.device)
    visible = key_at <= query_at
    if spec.window is not None:
        visible &= key_at > query_at - spec.window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("gqnc,gcd->ngqd", weights, values.float()).reshape(q.shape).to(q.dtype)
