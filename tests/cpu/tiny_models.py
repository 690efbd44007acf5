"""Tiny random models of every supported family, made and saved by transformers; and its logits for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 97
MAX_POSITIONS = 32  # of the unscaled models; the longest test sequence is longer
SMALL_SHARD = "20KB"


def _tiny(kind: Callable[..., PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return kind(**(shape | options))


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

# Every option that changes the result is on in some case and off in another.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _tiny(LlamaConfig),
    "llama, tied": lambda: _tiny(LlamaConfig, tie_word_embeddings=True),
    "llama, head_dim as hidden / heads": lambda: _tiny(LlamaConfig, head_dim=8),
    "llama, big head_dim": lambda: _tiny(LlamaConfig, head_dim=80),
    "llama, as many key-value heads as query heads": lambda: _tiny(LlamaConfig, num_key_value_heads=6),
    "llama, one key-value head": lambda: _tiny(LlamaConfig, num_key_value_heads=1),
    "llama, attention bias": lambda: _tiny(LlamaConfig, attention_bias=True),
    "llama, mlp bias": lambda: _tiny(LlamaConfig, mlp_bias=True),
    "llama, linear rope": lambda: _tiny(LlamaConfig, **_rope("linear", factor=3.0)),
    "llama, dynamic rope": lambda: _tiny(LlamaConfig, max_position_embeddings=MAX_POSITIONS, **_rope("dynamic", factor=4.0)),
    "llama, llama3 rope": lambda: _tiny(LlamaConfig, **_rope("llama3", **_LLAMA3)),
    "llama, yarn rope": lambda: _tiny(LlamaConfig, **_rope("yarn", **_YARN)),
    "llama, yarn rope, not truncated": lambda: _tiny(
        LlamaConfig, **_rope("yarn", truncate=False, beta_fast=4, beta_slow=2, **_YARN)
    ),
    "llama, yarn rope, mscale": lambda: _tiny(LlamaConfig, **_rope("yarn", mscale=2.0, mscale_all_dim=0.5, **_YARN)),
    "llama, yarn rope, attention factor": lambda: _tiny(LlamaConfig, **_rope("yarn", attention_factor=1.7, **_YARN)),
    "mistral, no window": lambda: _tiny(MistralConfig, sliding_window=None),
    "mistral, sliding window": lambda: _tiny(MistralConfig, sliding_window=9),
    "mistral, window of two tokens, head_dim": lambda: _tiny(
        MistralConfig, sliding_window=2, head_dim=12, tie_word_embeddings=True
    ),
    "qwen2": lambda: _tiny(Qwen2Config),
    "qwen2, tied": lambda: _tiny(Qwen2Config, tie_word_embeddings=True),
    "qwen2, windows in the last layers": lambda: _tiny(
        Qwen2Config, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen2, windows by layer_types, yarn rope": lambda: _tiny(
        Qwen2Config,
        use_sliding_window=True,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_rope("yarn", **_YARN),
    ),
    "qwen3": lambda: _tiny(Qwen3Config),
    "qwen3, tied, attention bias": lambda: _tiny(Qwen3Config, tie_word_embeddings=True, attention_bias=True),
    "qwen3, windows, dynamic rope": lambda: _tiny(
        Qwen3Config,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=2,
        max_position_embeddings=MAX_POSITIONS,
        **_rope("dynamic", factor=2.0),
    ),
}


def save_tiny(case: str, directory: Path, max_shard_size: str = SMALL_SHARD) -> Path:
    """Saves the tiny model of `case`, with every weight, bias and norm random (from a fixed seed)."""
    generator = torch.Generator().manual_seed(1)
    config = CONFIGS[case]()
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.2) if name.endswith("norm.weight") else (0.0, 0.2)
            parameter.normal_(mean, std, generator=generator)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def load_reference(model_dir: Path) -> PreTrainedModel:
    """transformers' float32 model with eager attention."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: PreTrainedModel, tokens: Sequence[int], prompt_tokens: int | None = None) -> Tensor:
    """Logits [len(tokens), V] after each token: a prefill of `prompt_tokens` (None: all), then one at a time through its cache.

    On a copy, because dynamic RoPE leaves its longest length behind in the model.
    """
    fresh = copy.deepcopy(model)
    prompt = prompt_tokens or len(tokens)
    with torch.inference_mode():
        out = fresh(torch.tensor([tokens[:prompt]]), use_cache=True)
        rows = [out.logits[0]]
        for token in tokens[prompt:]:
            out = fresh(torch.tensor([[token]]), cache=out.cache, use_cache=True)
            rows.append(out.logits[0])
    return torch.cat(rows)
