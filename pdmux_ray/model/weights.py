"""Streams a checkpoint into packed weights: one fused matrix and one block of a file are resident beyond what is kept.

A block is read through a map of the file that is closed again at once, because mapped pages count as resident memory for as
long as the map lives. Nothing is left out silently: a weight that is missing, left over or misshapen is named in an error.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmux_ray.errors import WeightsError
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.ops import LayerWeights, Ops

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# Buffers that old checkpoints carry; they follow from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
BLOCK_ELEMENTS = 4 * 2**20  # read from a file at a time
OWN_MAPPING_BYTES = 2**18
DUMMY_SEED = 0
VECTOR_SPREAD = 0.02  # standard deviation of random norms and biases
FLOATS = ("F64", "F32", "F16", "BF16")

Load = Literal["weights", "dummy"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of a decoder's weights; `embedding` is a plain [V, H] tensor, `head` is packed."""

    embedding: Tensor
    head: Any
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]


class WeightSource(Protocol):
    """Where weights come from."""

    def fill(self, name: str, target: Tensor) -> None:
        """Writes the weight `name` into `target`, which has its shape, casting to the target's dtype."""


def expected_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every weight the config calls for, by its name in a checkpoint (the head only when it is not tied)."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden), FINAL_NORM: (config.hidden,)}
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, config.hidden)
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden, config.intermediate
    linears = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def load_weights(
    config: DecoderConfig, source: WeightSource, dtype: torch.dtype, ops: Ops, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Fuses, casts and packs every weight, the biggest first. The source must hold all of `expected_shapes(config)`."""
    return _Loader(config, source, dtype, ops, device).load()


class _Loader:
    """Holds what every step of loading needs; used once."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, dtype: torch.dtype, ops: Ops, device: torch.device | str
    ) -> None:
        self._config, self._source, self._ops = config, source, ops
        self._dtype, self._device = dtype, device
        self._shapes = expected_shapes(config)

    def load(self) -> DecoderWeights:
        embedding = self._tensor(EMBEDDING)
        head = self._ops.pack_linear(embedding if self._config.tied else self._tensor(HEAD), None)
        layers = tuple(self._layer(f"model.layers.{layer}") for layer in range(self._config.layers))
        return DecoderWeights(embedding, head, self._tensor(FINAL_NORM), layers)

    def _layer(self, prefix: str) -> LayerWeights:
        qk_norm = self._config.qk_norm
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(*(f"{prefix}.self_attn.{part}_proj" for part in "qkv")),
            q_norm=self._tensor(f"{prefix}.self_attn.q_norm.weight") if qk_norm else None,
            k_norm=self._tensor(f"{prefix}.self_attn.k_norm.weight") if qk_norm else None,
            o=self._linear(f"{prefix}.self_attn.o_proj"),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self._linear(f"{prefix}.mlp.down_proj"),
        )

    def _linear(self, *modules: str) -> Any:
        """One packed matrix whose rows are those of `modules`, one after the other."""
        biased = f"{modules[0]}.bias" in self._shapes
        bias = self._tensor(*(f"{module}.bias" for module in modules)) if biased else None
        return self._ops.pack_linear(self._tensor(*(f"{module}.weight" for module in modules)), bias)

    def _tensor(self, *names: str) -> Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        fused = _allocate((sum(rows), *shapes[0][1:]), self._dtype, torch.device(self._device))
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            self._source.fill(name, part)
        return fused


def _allocate(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. On the CPU it has a mapping of its own when it is big: what a packed copy replaces goes back to
    the system at once, where freed pieces of the heap would stay resident in between the packed weights."""
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size_bytes < OWN_MAPPING_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class DummySource:
    """Random weights, drawn where they are to be: the same ones each time on the same kind of device.

    A matrix [out, in] has the standard deviation 1 / sqrt(in): whatever the shape, activations are about as large as in trained
    models, attention is neither uniform nor one-hot, and tokens depend on those before them. Norms are near 1.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, name: str, target: Tensor) -> None:
        generator = self._generators.get(target.device)
        if generator is None:
            generator = self._generators[target.device] = torch.Generator(target.device).manual_seed(DUMMY_SEED)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        spread = target.shape[-1] ** -0.5 if target.dim() > 1 else VECTOR_SPREAD
        target.normal_(mean, spread, generator=generator)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is and what its file says of it."""

    path: Path
    shape: Shape
    dtype: str  # safetensors' name


class Checkpoint:
    """The safetensors files of a Hugging Face directory, checked against a config when made.

    Raises WeightsError that names every missing, unexpected or wrongly shaped weight.
    """

    def __init__(self, model_dir: Path, config: DecoderConfig) -> None:
        stored = _list_tensors(model_dir)
        self._stored = {name: entry for name, entry in stored.items() if not name.endswith(HARMLESS_SUFFIXES)}
        shapes = expected_shapes(config)
        if config.tied and HEAD in self._stored:
            shapes[HEAD] = shapes[EMBEDDING]
        _check(model_dir, self._stored, shapes)
        if config.tied and HEAD in self._stored:
            self._require_equal(HEAD, EMBEDDING)

    def fill(self, name: str, target: Tensor) -> None:
        for start, block in self._blocks(name):
            target[start : start + len(block)].copy_(block)

    def _blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) in blocks of about BLOCK_ELEMENTS. A block is valid until the next one is asked for."""
        entry = self._stored[name]
        rows = max(1, BLOCK_ELEMENTS // torch.Size(entry.shape[1:]).numel())
        for start in range(0, entry.shape[0], rows):
            with safe_open(entry.path, framework="pt") as file:
                yield start, file.get_slice(name)[start : start + rows]

    def _require_equal(self, name: str, other: str) -> None:
        for (_, left), (_, right) in zip(self._blocks(name), self._blocks(other), strict=True):
            if not torch.equal(left, right):
                raise WeightsError(
                    f"{name} differs from {other}, but the config ties them (set tie_word_embeddings to false if it is real)"
                )


def _list_tensors(model_dir: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for path in _shards(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    if name in stored:
                        raise WeightsError(f"{name} is both in {stored[name].path.name} and in {path.name} of {model_dir}")
                    view = file.get_slice(name)
                    stored[name] = _Stored(path, tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path}: {error}. Download the model again.") from None
    return stored


def _shards(model_dir: Path) -> list[Path]:
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise WeightsError(
            f"{model_dir} holds neither {single.name} nor {index.name}. Other formats are not read: save the model with "
            "transformers' save_pretrained first."
        )
    try:
        return [model_dir / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files: {error!r}") from None


def _check(model_dir: Path, stored: dict[str, _Stored], shapes: dict[str, Shape]) -> None:
    problems = [f"missing: {name}" for name in shapes if name not in stored]
    problems += [f"unexpected: {name}" for name in sorted(stored) if name not in shapes]
    both = [(name, stored[name], shape) for name, shape in shapes.items() if name in stored]
    problems += [
        f"wrong shape: {name} is {list(entry.shape)}, the config calls for {list(shape)}"
        for name, entry, shape in both
        if entry.shape != shape
    ]
    problems += [
        f"wrong type: {name} is {entry.dtype}, not one of {', '.join(FLOATS)}"
        for name, entry, _ in both
        if entry.dtype not in FLOATS
    ]
    if problems:
        raise WeightsError(f"the weights in {model_dir} do not fit its config.json:\n  " + "\n  ".join(problems))
