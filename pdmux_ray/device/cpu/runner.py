"""Runs steps on the CPU: decodes and prefill slices together in one forward."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.device.cpu.ops import CpuOps, make_ops
from pdmux_ray.device.kv_pool import allocate_on_cpu, layout_for
from pdmux_ray.device.sampler import Sampler
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import GiveUp, SequenceView, StepBatch, StepOutput, never
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder, load_decoder


@dataclass(frozen=True, slots=True)
class _Launched:
    """`logits` [len(sampled), V]; None when there is nothing to sample."""

    logits: Tensor | None
    sampled: list[SequenceView]
    given_up: bool


class CpuRunner:
    """A `Runner`. Owns the weights, the KV pool and the sampler; all cores work on one step, the calling thread among them.

    Raises ConfigError, UnsupportedModelError or WeightsError when the model cannot be loaded.
    """

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        model = DecoderConfig.from_pretrained(model_dir)
        if config.context_length is not None:
            model = replace(model, context_length=min(model.context_length, config.context_length))
        self.dtype = resolve_dtype(config.dtype)
        self.threads = config.threads or usable_cores()
        layout = layout_for(config.kv_cache_gib, model.layers, model.kv_heads, model.head_dim, config.page_size, self.dtype)
        self.pages, self.page_size = layout.pages, layout.page_size
        ops = make_ops(allocate_on_cpu(layout, self.dtype))
        self.kernels = "native" if isinstance(ops, CpuOps) else "torch"
        self._decoder: Decoder | None = load_decoder(model_dir, self.dtype, ops, config.load, model)
        self._layers, self._dynamic_rope = model.layers, model.rope.dynamic
        self._sampler = Sampler()
        self._step_thread = 0
        self._launched: _Launched | None = None

    def launch(self, batch: StepBatch, give_up: GiveUp = never) -> None:
        """Computes the step; with prefills it asks `give_up` after every layer."""
        if self._decoder is None:
            raise RuntimeError("the runner is closed")
        self._use_threads()
        step = StepTensors(batch, self.page_size, self._dynamic_rope)
        with torch.inference_mode():
            hidden = self._layers_of(self._decoder, step, give_up if batch.prefills else None)
            logits = None
            if hidden is not None and step.sampled:
                logits = self._decoder.logits(hidden if len(step.rows) == len(hidden) else hidden[step.rows])
        self._launched = _Launched(logits, step.sampled, given_up=hidden is None)

    def _layers_of(self, decoder: Decoder, step: StepTensors, give_up: GiveUp | None) -> Tensor | None:
        """Hidden states [T, H] after the last layer; None when given up."""
        hidden = decoder.embed(step.token_ids)
        if give_up is None:
            return decoder.run_layers(0, self._layers, hidden, step.batch)
        for layer in range(self._layers):
            if give_up():
                return None
            hidden = decoder.run_layers(layer, layer + 1, hidden, step.batch)
        return hidden

    def collect(self) -> StepOutput | None:
        launched, self._launched = self._launched, None
        if launched is None:
            raise RuntimeError("collect was called without a launched step")
        if launched.given_up:
            return None
        if launched.logits is None:
            return StepOutput()
        with torch.inference_mode():
            return self._sampler.sample(launched.logits, launched.sampled)

    def close(self) -> None:
        self._decoder = self._launched = None

    def _use_threads(self) -> None:
        """OpenMP keeps the number of threads per calling thread: it is set in the one that runs steps."""
        if self._step_thread != threading.get_ident():
            torch.set_num_threads(self.threads)
            self._step_thread = threading.get_ident()


def resolve_dtype(name: str) -> torch.dtype:
    """ "auto" is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
