"""The operations of a decoder layer on the CPU: kernels.cpp, or torch and oneDNN where it cannot be built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdmux_ray.device.cpu.native import Kernels, NativeUnavailableError, PanelLinear, load_library
from pdmux_ray.device.cpu.whole_layers import WholeLayers, all_packed
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, LayerWeights, RunLayers
from pdmux_ray.model.reference_ops import ReferenceOps

_MAX_HEAD_DIM = 256
_ROWS_HINT = 16  # how many rows oneDNN should choose its layout for


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """A weight in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None


class TorchOps(ReferenceOps):
    """Linears by oneDNN with packed weights; the rest in plain torch. For machines without a compiler."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        if not torch._C._has_mkldnn:
            return super().pack_linear(weight, bias)
        return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT), bias)

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        """oneDNN sums a row alike whatever the number of rows, except a single one, which is therefore computed as two: a row's
        result does not depend on the batch."""
        if not isinstance(packed, OneDnnLinear):
            return super().linear(x, packed, residual)
        if len(x) == 1:
            twice = residual if residual is None else residual.expand(2, -1)
            return self._product(x.expand(2, -1), packed, twice)[:1]
        return self._product(x, packed, residual)

    def _product(self, x: Tensor, packed: OneDnnLinear, residual: Tensor | None) -> Tensor:
        onednn = torch.ops.mkldnn._linear_pointwise
        out: Tensor
        if residual is None:
            out = onednn(x, packed.weight, packed.bias, "none", [], "")
        else:
            out = onednn.binary(x, residual, packed.weight, packed.bias, "add")
        return out


class CpuOps(TorchOps):
    """The fast operations. Raises NativeUnavailableError when the kernels cannot be built here."""

    def __init__(self, kv_pool: Tensor) -> None:
        super().__init__(kv_pool)
        self._kernels = Kernels(load_library(), kv_pool)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        if not self._kernels.linear_is_fast or weight.shape[1] % 2:
            return super().pack_linear(weight, bias)
        return PanelLinear(self._kernels.pack(weight), bias, len(weight))

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        if not isinstance(packed, PanelLinear):
            return super().linear(x, packed, residual)
        out = x.new_empty(len(x), packed.outputs)
        self._kernels.linear(x, packed.weight, packed.bias, residual, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return out

    def qkv_to_attention(self, layer: int, qkv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        out = qkv.new_empty(len(qkv), spec.heads * spec.head_dim)
        self._kernels.attention(layer, qkv, batch, spec, out)
        return out

    def whole_layers(
        self, weights: Sequence[LayerWeights], specs: Sequence[AttentionSpec], norm_eps: float
    ) -> RunLayers | None:
        """None where `pack_linear` left a weight to torch: on processors without the instructions, or with an odd width."""
        return WholeLayers(self._kernels, weights, specs, norm_eps) if all_packed(weights) else None


def make_ops(kv_pool: Tensor) -> TorchOps:
    """The fastest operations that work here; warns once when those are not the fast ones, and says what to do."""
    head_dim = kv_pool.shape[5]
    try:
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
            raise NativeUnavailableError(
                f"the kernels take a head_dim that is a multiple of 16 up to {_MAX_HEAD_DIM}, not {head_dim}"
            )
        return CpuOps(kv_pool)
    except NativeUnavailableError as error:
        warnings.warn(f"slow attention: {error}. Answers are the same.", RuntimeWarning, stacklevel=2)
        return TorchOps(kv_pool)
