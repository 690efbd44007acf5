"""What a decoder layer asks of a device. `reference_ops` has the plain torch answer; each device may bring a faster one.

Shapes use T = tokens in the step (all requests laid end to end), H = hidden, NH / KVH = query / key-value heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """Where each token of a step lives. All tensors are on the device; B = number of sequences in the step.

    Sequence b owns tokens [query_starts[b], query_starts[b + 1]) of the step: the last of its context_lengths[b] tokens.
    """

    positions: Tensor  # [T] int64: position of each token in its sequence
    slots: Tensor  # [T] int64: where its KV goes: page * page_size + offset
    query_starts: Tensor  # [B + 1] int32
    context_lengths: Tensor  # [B] int32: tokens with KV after this step's writes
    page_table: Tensor  # [B, max pages] int32; entries past a sequence's last page are 0 and never read
    rope_lengths: Tensor | None = None  # [T] int64, only for dynamic RoPE scaling: see rope.py
    decodes: int = 0  # so many of the first sequences have one token each; a device may compute those in another way
    host: AttentionBatch | None = None  # the same on the host, for devices that do not let it read theirs without waiting


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `Any` is what `Ops.pack_linear` returned. Norms are [H] (q/k: [D]) tensors in the model's dtype."""

    input_norm: Tensor
    qkv: Any  # rows: queries, keys, values
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Any
    post_norm: Tensor
    gate_up: Any  # rows: gate, up
    down: Any


class RunLayers(Protocol):
    """Whole layers of one decoder."""

    def __call__(self, start: int, end: int, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Layers [start, end), one at least: hidden [T, H] -> hidden [T, H]; writes their KV. Consumes `hidden`."""


class Ops(Protocol):
    """Operations of one lane of a device. One thread at a time; another lane brings its own, over the same KV pool."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Turns a [out, in] weight into whatever `linear` wants; the original may be dropped afterwards."""

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out], plus bias, plus `residual` [T, out] when given."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] -> [T, H]; mean of squares in float32."""

    def qkv_to_attention(self, layer: int, qkv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        """q/k norm, RoPE, KV write, then causal attention over each sequence's pages.

        qkv [T, (NH + 2 KVH) D] -> [T, NH D].
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(first half) * second half."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids [T] int64, table [V, H] -> [T, H]."""

    def whole_layers(
        self, weights: Sequence[LayerWeights], specs: Sequence[AttentionSpec], norm_eps: float
    ) -> RunLayers | None:
        """A faster way through a decoder's layers, if there is one; else they are computed by the operations above."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, apart from its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k
    window: int | None  # sliding window: a query sees the last `window` tokens, itself included; None: all
    rope: Any  # rope.Rope: cos/sin for positions
    q_norm: Tensor | None = None  # [D], Qwen3
    k_norm: Tensor | None = None  # [D], Qwen3
    norm_eps: float = 1e-6
