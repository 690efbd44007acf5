"""What a decoder layer asks of a device. `reference_ops` has the plain torch answer; each device may bring a faster one.

Shapes use T = tokens in the step (all requests laid end to end), H = hidden, NH / KVH = query / key-value heads, D = head_dim.
"""

from __future__ import annotations

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


class Ops(Protocol):
    """Operations of one device (of one lane, later)."""

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
