"""What a decoder needs to know of a Hugging Face config, checked once; nothing else in it has an effect on the result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdmux_ray.errors import ConfigError, UnsupportedModelError
from pdmux_ray.model.context import context_length, head_dim
from pdmux_ray.model.rope import RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
SUPPORTED = (
    f"Supported: {', '.join(ARCHITECTURES.values())} (dense, text only, unquantized); activation silu; RoPE over the whole "
    f"head, of type {', '.join(ROPE_KINDS)}; full and sliding-window attention."
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and options of a decoder. Lengths are in tokens."""

    family: str  # key of ARCHITECTURES
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool  # the output head is the embedding table
    windows: tuple[int | None, ...]  # one a layer: sliding window, None: all tokens
    rope: RopeSpec

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def from_pretrained(cls, model_dir: Path | str) -> DecoderConfig:
        """Reads config.json. Raises ConfigError, UnsupportedModelError."""
        directory = Path(model_dir)
        raw = _read_json(directory / "config.json")
        _require_supported_architecture(raw, directory)
        hf = _load_hf_config(directory)
        _require_supported_options(hf, raw)
        family = raw["model_type"]
        return cls(
            family=family,
            layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=head_dim(hf),
            intermediate=hf.intermediate_size,
            vocab_size=hf.vocab_size,
            context_length=context_length(hf),
            norm_eps=hf.rms_norm_eps,
            qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and hf.attention_bias),
            o_bias=family in ("llama", "qwen3") and hf.attention_bias,
            mlp_bias=family == "llama" and hf.mlp_bias,
            qk_norm=family == "qwen3",
            tied=bool(hf.tie_word_embeddings),
            windows=_windows(hf, family),
            rope=_rope_spec(hf),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. A model is a Hugging Face directory.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return document


def _load_hf_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the library raises many kinds for a bad value
        raise ConfigError(f"transformers cannot read {directory / 'config.json'}: {error}") from error


def _require_supported_architecture(raw: dict[str, Any], directory: Path) -> None:
    """Before the library is asked: it may not even know the model's type."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UnsupportedModelError(f"{directory}: model type {family!r} is not supported. {SUPPORTED}")
    names = raw.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in names:
        raise UnsupportedModelError(f"{directory}: architecture {', '.join(map(str, names))} is not supported. {SUPPORTED}")
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise UnsupportedModelError(f"{directory}: quantized checkpoints are not supported. {SUPPORTED}")


def _require_supported_options(hf: Any, raw: dict[str, Any]) -> None:
    rope = hf.rope_parameters or {}
    kind = rope.get("rope_type")
    problems = []
    if hf.hidden_act != "silu":
        problems.append(f"activation {hf.hidden_act!r}")
    if kind not in ROPE_KINDS:
        nested = any(isinstance(value, dict) for value in rope.values())
        problems.append("RoPE parameters that differ between layers" if nested else f"RoPE type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial rotary embedding (factor {rope['partial_rotary_factor']})")
    if head_dim(hf) % 2:
        problems.append(f"an odd head_dim ({head_dim(hf)})")
    if hf.num_attention_heads % hf.num_key_value_heads:
        problems.append(f"{hf.num_attention_heads} query heads that {hf.num_key_value_heads} key-value heads do not divide")
    types = raw.get("layer_types") or []
    strange = sorted(set(types) - {"full_attention", "sliding_attention"})
    if strange:
        problems.append(f"layer types {', '.join(strange)}")
    elif types and len(types) != hf.num_hidden_layers:
        problems.append(f"{len(types)} layer_types for {hf.num_hidden_layers} layers")
    elif types and raw["model_type"] in ("llama", "mistral"):
        problems.append(f"layer_types in a {raw['model_type']} config")
    elif "sliding_attention" in types and hf.sliding_window is None:
        problems.append("sliding_attention layers without use_sliding_window and sliding_window")
    if problems:
        raise UnsupportedModelError(f"the model's config asks for what is not supported: {'; '.join(problems)}. {SUPPORTED}")


def _windows(hf: Any, family: str) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * int(hf.num_hidden_layers)
    if family == "mistral":
        return (hf.sliding_window,) * int(hf.num_hidden_layers)
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _rope_spec(hf: Any) -> RopeSpec:
    """The library's own functions do the arithmetic, so that the frequencies are those of the reference to the bit."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf.rope_parameters
    kind, theta, dim = rope["rope_type"], float(rope["rope_theta"]), head_dim(hf)
    if kind in ("default", "dynamic"):  # dynamic: up to max_position_embeddings
        inv_freq, attention_factor = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim)), 1.0
    else:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return RopeSpec(
        kind=kind,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=float(attention_factor),
        theta=theta,
        factor=float(rope.get("factor") or 1.0),
        max_position_embeddings=hf.max_position_embeddings,
    )
