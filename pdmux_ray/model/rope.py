"""Rotary position embedding: the cosines and sines that rotate queries and keys.

Element i of a head is rotated together with element i + head_dim / 2, so a row holds head_dim / 2 angles. All is float32.

Static kinds (default, linear, llama3, yarn) turn a token by an angle that depends on its position alone: `Rope.cos` and
`Rope.sin` are tables over all positions, and a device may index them itself.

Dynamic NTK scaling has no table: a token's frequencies depend on a length too. Once the longest sequence of a forward call
exceeds `max_position_embeddings`, `transformers` takes the frequencies of that length: the whole prompt's for every prompt
token, then those of one token more at each decode step; it never rotates again what is in its cache. Said per token, so that
chunks, batches and preemptions change nothing: the token at position p of a request whose original prompt has P tokens takes
the frequencies of length max(P, p + 1). That number is `AttentionBatch.rope_lengths`; every length up to
`max_position_embeddings` gives the unscaled frequencies. KV then depends on P, not on the tokens alone: a prefix cache
must not share it between requests (`RopeSpec.dynamic` says so).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """What a model's config says about RoPE, with the arithmetic of its scaling kind already done."""

    kind: str  # "default", "linear", "dynamic", "llama3" or "yarn"
    inv_freq: tuple[float, ...]  # [head_dim / 2] float32 values, radians a position
    attention_factor: float = 1.0  # multiplies cos and sin (yarn)
    theta: float = 10000.0
    factor: float = 1.0
    max_position_embeddings: int = 0  # dynamic: where scaling sets in, tokens

    @property
    def dynamic(self) -> bool:
        """Whether `AttentionBatch.rope_lengths` must be given, and the prefix cache be off."""
        return self.kind == "dynamic"


class Rope:
    """Cosines and sines for positions, on one device.

    `cos` and `sin` are [context_length, head_dim / 2] float32 tables, or None when the kind is dynamic.
    """

    def __init__(self, spec: RopeSpec, context_length: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        if not spec.dynamic:
            self.cos, self.sin = self._rotate(torch.arange(context_length, device=device), self._inv_freq)

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Two [T, head_dim / 2] float32 tensors for `positions` [T] int64; `lengths` [T] int64 matters to dynamic RoPE only.

        Raises ValueError when dynamic RoPE is given no lengths.
        """
        if self.cos is not None and self.sin is not None:
            return self.cos[positions], self.sin[positions]
        if lengths is None:
            raise ValueError("dynamic RoPE scaling needs AttentionBatch.rope_lengths")
        return self._rotate(positions, self._dynamic_inv_freq(lengths))

    def _rotate(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inv_freq
        return angles.cos() * self.spec.attention_factor, angles.sin() * self.spec.attention_factor

    def _dynamic_inv_freq(self, lengths: Tensor) -> Tensor:
        """[T, head_dim / 2]: the NTK-scaled frequencies of each token's length."""
        spec, dim = self.spec, 2 * len(self.spec.inv_freq)
        grown = lengths.clamp(min=spec.max_position_embeddings)
        stretch = spec.factor * grown / spec.max_position_embeddings - (spec.factor - 1)
        theta = spec.theta * stretch ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=lengths.device).float() / dim
        return 1.0 / theta[:, None] ** exponents
