"""A block of decoder layers as one native call: nothing in it needs the GIL, so lanes do not wait for each other's Python."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdmux_ray.device.cpu.native import Buffers, DecoderLayer, Kernels, Linear, PanelLinear
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, LayerWeights


class WholeLayers:
    """A `RunLayers` over layers whose four linears are each a PanelLinear.

    Owns the room for what a layer computes on its way, as much as the longest step so far needed; hence one thread at a time.
    """

    def __init__(
        self, kernels: Kernels, weights: Sequence[LayerWeights], specs: Sequence[AttentionSpec], norm_eps: float
    ) -> None:
        self._kernels, self._weights, self._specs, self._eps = kernels, weights, specs, norm_eps  # addresses point into these
        structs = [_struct(kernels, at, *layer) for at, layer in enumerate(zip(weights, specs, strict=True))]
        self._layers = (DecoderLayer * len(structs))(*structs)
        self._room_rows, self._room, self._buffers = 0, list[Tensor](), Buffers()

    def __call__(self, start: int, end: int, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        if len(hidden) > self._room_rows:
            self._make_room(hidden)
        self._kernels.run_layers(self._layers, start, end, self._eps, hidden, batch, self._specs[start], self._buffers)
        return hidden

    def _make_room(self, hidden: Tensor) -> None:
        rows, width = hidden.shape
        some = min(rows, self._kernels.block_rows)
        layer, spec = self._layers[0], self._specs[0]
        gate_up = layer.gate_up.outputs
        shapes = {
            "qkv": (rows, layer.qkv.outputs),
            "attended": (rows, spec.heads * spec.head_dim),
            "normed": (some, width),
            "gate_up": (some, gate_up),
            "inner": (some, gate_up // 2),
        }
        self._room = [hidden.new_empty(shape) for shape in shapes.values()]
        self._buffers = Buffers(**{name: room.data_ptr() for name, room in zip(shapes, self._room, strict=True)})
        self._room_rows = rows


def all_packed(weights: Sequence[LayerWeights]) -> bool:
    return all(isinstance(w, PanelLinear) for layer in weights for w in (layer.qkv, layer.o, layer.gate_up, layer.down))


def _struct(kernels: Kernels, at: int, weights: LayerWeights, spec: AttentionSpec) -> DecoderLayer:
    return DecoderLayer(
        attention=kernels.layer_address(at, spec),
        input_norm=weights.input_norm.data_ptr(),
        post_norm=weights.post_norm.data_ptr(),
        qkv=_linear(weights.qkv),
        o=_linear(weights.o),
        gate_up=_linear(weights.gate_up),
        down=_linear(weights.down),
    )


def _linear(packed: PanelLinear) -> Linear:
    bias = None if packed.bias is None else packed.bias.data_ptr()
    return Linear(weight=packed.weight.data_ptr(), bias=bias, words=packed.weight.shape[1], outputs=packed.outputs)
