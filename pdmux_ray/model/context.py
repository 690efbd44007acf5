"""How many tokens a model is made for. Torch-free: the gateway asks too."""

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
