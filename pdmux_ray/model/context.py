"""What the control plane must know of a transformers config. Torch-free: the gateway asks too."""

from __future__ import annotations

from typing import Any


def context_length(hf: Any) -> int:
    """Of a transformers config, in tokens: a linear, dynamic or yarn factor multiplies the length before scaling."""
    rope: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
    kind, stated = rope.get("rope_type"), int(hf.max_position_embeddings)
    if kind in ("linear", "dynamic"):
        return int(stated * rope["factor"])
    if kind == "yarn" and rope.get("factor"):
        return max(stated, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return stated


def prefixes_are_shareable(hf: Any) -> bool:
    """False for dynamic RoPE scaling: KV then depends on the length of the whole prompt, not on the tokens alone (rope.py)."""
    return (getattr(hf, "rope_parameters", None) or {}).get("rope_type") != "dynamic"


def head_dim(hf: Any) -> int:
    """Elements of a head; what a config leaves out, the hidden size has."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
