"""Shapes of models, as config.json files that the check writes itself: no download, random weights. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DTYPE_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense Llama in bfloat16."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    rope_theta: float = 1e4

    @property
    def linear_parameters(self) -> int:
        """Of all layers' matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """Of all matrices, with the embedding table and the output head."""
        return (self.linear_parameters + 2 * self.vocab_size * self.hidden) * DTYPE_BYTES

    @property
    def kv_bytes(self) -> int:
        """Of one token, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES

    def decode_bytes(self, batch: int, context: int) -> int:
        """That a decode step must read: every matrix, the output head and each context's KV once. The embedding table, of which
        it reads a row a request, is left out."""
        weights = (self.linear_parameters + self.vocab_size * self.hidden) * DTYPE_BYTES
        return weights + batch * context * self.kv_bytes

    def prefill_flop(self, tokens: int) -> float:
        """Of a prompt, without the output head: 2 a weight and token, 4 a query element and key that it sees (q·k and p·v)."""
        pairs = tokens * (tokens + 1) / 2
        return 2.0 * self.linear_parameters * tokens + 4.0 * self.heads * self.head_dim * self.layers * pairs

    def write(self, folder: Path) -> Path:
        """A directory with a config.json, for `load: dummy`. Raises OSError."""
        directory = folder / self.name
        directory.mkdir(parents=True, exist_ok=True)
        document = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (directory / "config.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return directory


# Their config.json on the hub says so.
LLAMA_8B = ModelShape("llama-3.1-8b-shape", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 5e5)
CODELLAMA_34B = ModelShape("codellama-34b-shape", 48, 8192, 64, 8, 128, 22_016, 32_000, 16_384, 1e6)
SMALL = ModelShape("small", 4, 512, 8, 2, 64, 1024, 4096, 2048)
TINY = ModelShape("tiny", 2, 32, 2, 1, 16, 32, 128, 256)
