"""The decoder of the dense Llama, Mistral, Qwen2 and Qwen3 families: one forward over any range of layers.

    embed ─► layers [start, end) ─► logits          layer: hidden += o(attention(qkv(norm(hidden))))
                                                           hidden += down(silu(gate) * up), gate and up of norm(hidden)

It knows nothing of devices (see ops.py), of requests, or of who owns a page.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec, LayerWeights, Ops
from pdmux_ray.model.rope import Rope
from pdmux_ray.model.weights import Checkpoint, DecoderWeights, DummySource, Load, load_weights

__all__ = ["Decoder", "DecoderConfig", "load_decoder"]


class Decoder:
    """A decoder on one device. Tensors are laid out as in ops.py: T = tokens of the step, all requests end to end."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, rope: Rope) -> None:
        self.config = config
        self._weights, self._ops, self._rope = weights, ops, rope
        self._specs = [_attention_spec(config, layer, weights.layers[layer], rope) for layer in range(config.layers)]
        self._whole_layers = ops.whole_layers(weights.layers, self._specs, config.norm_eps)

    def with_ops(self, ops: Ops) -> Decoder:
        """The same decoder on another lane: it shares the weights, which must be packed for `ops`, too."""
        return Decoder(self.config, self._weights, ops, self._rope)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> hidden [T, H]."""
        return self._ops.embed(token_ids, self._weights.embedding)

    def run_layers(self, start: int, end: int, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """Layers [start, end): hidden [T, H] -> hidden [T, H]; writes their KV. Consumes its argument: use what it returns."""
        if self._whole_layers is not None and start < end:
            return self._whole_layers(start, end, hidden, batch)
        ops, eps = self._ops, self.config.norm_eps
        for layer in range(start, end):
            weights = self._weights.layers[layer]
            qkv = ops.linear(ops.rms_norm(hidden, weights.input_norm, eps), weights.qkv)
            attended = ops.qkv_to_attention(layer, qkv, batch, self._specs[layer])
            hidden = ops.linear(attended, weights.o, residual=hidden)
            gate_up = ops.linear(ops.rms_norm(hidden, weights.post_norm, eps), weights.gate_up)
            hidden = ops.linear(ops.silu_mul(gate_up), weights.down, residual=hidden)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [rows, H], the rows to sample from, after the last layer -> [rows, V] float32, in `out` when given."""
        normed = self._ops.rms_norm(hidden, self._weights.final_norm, self.config.norm_eps)
        found = self._ops.linear(normed, self._weights.head)
        return found.float() if out is None else out.copy_(found)


def _attention_spec(config: DecoderConfig, layer: int, weights: LayerWeights, rope: Rope) -> AttentionSpec:
    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.windows[layer],
        rope=rope,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        norm_eps=config.norm_eps,
    )


def load_decoder(
    model_dir: Path | str,
    dtype: torch.dtype,
    ops: Ops,
    load: Load = "weights",
    config: DecoderConfig | None = None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Loads the model in `model_dir`; "dummy" makes random weights of its shape and reads config.json only.

    `config` overrides what config.json says (a shorter context_length).
    Raises ConfigError, UnsupportedModelError, WeightsError.
    """
    directory = Path(model_dir)
    config = config or DecoderConfig.from_pretrained(directory)
    source = DummySource() if load == "dummy" else Checkpoint(directory, config)
    weights = load_weights(config, source, dtype, ops, device)
    return Decoder(config, weights, ops, Rope(config.rope, config.context_length, device))
