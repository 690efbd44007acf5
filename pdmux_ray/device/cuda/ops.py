"""The operations of a decoder layer on CUDA: this package's Triton kernels, cuBLAS for the linears, and for the attention of
prefills what `prefill_backends` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmux_ray.device.cuda.kernels.decode_attention import decode_attention, pieces_for
from pdmux_ray.device.cuda.kernels.rms_norm import rms_norm
from pdmux_ray.device.cuda.kernels.rope_kv import rope_kv
from pdmux_ray.device.cuda.kernels.silu_mul import silu_mul
from pdmux_ray.device.cuda.prefill_backends import MakeAttention, TritonPrefill
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.errors import IntegrityError
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, LayerWeights, RunLayers


@dataclass(frozen=True, slots=True)
class CublasLinear:
    """`transposed` [in, out]: a view of the weight as it was loaded."""

    transposed: Tensor
    bias: Tensor | None


class CudaOps:
    """Operations of one lane over a KV pool of `KVLayout.shape`.

    Every result lies in the lane's scratch until the next call of the same operation with the same width; `embed`'s is the
    step's hidden state, which `linear` adds to in place. Nothing is allocated once each operation has run for the longest step
    and for one of two tokens (which compiles the kernels, too); dynamic RoPE alone allocates its angles.

    A step of one token a sequence, and the first `batch.decodes` sequences of any step, use split-KV attention.
    """

    def __init__(self, kv_pool: Tensor, scratch: Scratch, sms: int, attention: MakeAttention = TritonPrefill) -> None:
        """`sms`: streaming multiprocessors that the lane has. `attention`: of prefills."""
        self.sms, self._scratch = sms, scratch
        self._prefill = attention(sms, scratch.max_sequences)
        self._layers = [(layer[0], layer[1]) for layer in kv_pool]  # keys, values: [pages, KVH, page_size, D]
        self._counting = torch.arange(scratch.max_tokens, device=scratch.device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CublasLinear:
        return CublasLinear(weight.contiguous().t(), bias)

    def linear(self, x: Tensor, packed: CublasLinear, residual: Tensor | None = None) -> Tensor:
        """With a residual the sum is computed into it, in the product's accumulator."""
        if residual is not None:
            residual.addmm_(x, packed.transposed)
            return residual if packed.bias is None else residual.add_(packed.bias)
        out = self._product(len(x), packed.transposed.shape[1])
        if packed.bias is None:
            return torch.mm(x, packed.transposed, out=out)
        return torch.addmm(packed.bias, x, packed.transposed, out=out)

    def _product(self, rows: int, width: int) -> Tensor:
        """A buffer of its own for few rows, so that the widest product, logits, has no room for a token each."""
        scratch = self._scratch
        most = scratch.max_sequences if rows <= scratch.max_sequences else scratch.max_tokens
        return scratch.view("products", rows, width, most=most)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._scratch.view("normed", *x.shape)
        rms_norm(x, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = self._scratch.view("activated", len(gate_up), gate_up.shape[1] // 2)
        silu_mul(gate_up, out)
        return out

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        out = self._scratch.view("hidden", len(token_ids), table.shape[1])
        return torch.index_select(table, 0, token_ids, out=out)

    def whole_layers(
        self, weights: Sequence[LayerWeights], specs: Sequence[AttentionSpec], norm_eps: float
    ) -> RunLayers | None:
        return None

    def qkv_to_attention(self, layer: int, qkv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        keys, values = self._layers[layer]
        angles, cos, sin = self._angles(batch, spec)
        rope_kv(qkv, batch.slots, angles, cos, sin, spec.q_norm, spec.k_norm, spec.norm_eps, keys, values)
        out = self._scratch.view("attended", len(qkv), spec.heads * spec.head_dim)
        sequences = len(batch.context_lengths)
        if sequences > self._scratch.max_sequences:
            raise IntegrityError(f"a step of {sequences} sequences on a lane made for {self._scratch.max_sequences}")
        decodes = sequences if sequences == len(qkv) else batch.decodes
        if decodes:
            self._decode(qkv[:decodes], keys, values, batch, spec, out[:decodes])
        if decodes < sequences:
            self._prefill(qkv, keys, values, batch, spec, out)
        return out

    def _decode(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
    ) -> None:
        scratch, rows = self._scratch, len(query)
        pieces = pieces_for(self.sms, spec.kv_heads, rows)
        most = pieces_for(self.sms, spec.kv_heads, scratch.max_sequences)
        decode_attention(
            query,
            keys,
            values,
            batch.page_table[:rows],
            batch.context_lengths[:rows],
            spec.scale,
            spec.window,
            self.sms,
            scratch.view("pieces", pieces, spec.heads * spec.head_dim, torch.float32, most),
            scratch.view("masses", pieces, spec.heads, torch.float32, most),
            out,
        )

    def _angles(self, batch: AttentionBatch, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        """(row of the tables for each token, cosines, sines)."""
        if spec.rope.cos is not None:
            return batch.positions, spec.rope.cos, spec.rope.sin
        return self._counting[: len(batch.positions)], *spec.rope.cos_sin(batch.positions, batch.rope_lengths)
