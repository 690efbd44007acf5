"""A CudaRunner without a GPU: over RecordingStreams, with operations in plain torch, which are faster than interpreted ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.cuda.answers import SamplingRows
from pdmux_ray.device.cuda.recording import Forget, RecordingStreams
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.startup import Kernels
from pdmux_ray.device.sampler import _pick
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.types import SamplingParams, Split

PAGE = 4


def reference_ops(kv_pool: Tensor, scratch: Scratch, sms: int) -> ReferenceOps:
    assert sms > 0
    return ReferenceOps(kv_pool)


def reference_sample(logits: Tensor, rows: SamplingRows, out: Tensor) -> None:
    """What device/sampler.py says, row by row, over the whole vocabulary."""
    for row, raw in enumerate(logits):
        temperature = float(rows.temperature[row])
        if temperature == 0.0:
            out[row] = raw.argmax()
            continue
        params = SamplingParams(
            temperature=temperature,
            top_k=int(rows.top_k[row]),
            top_p=min(float(rows.top_p[row]), 1.0),
            min_p=float(rows.min_p[row]),
        )
        best, ids = torch.log_softmax(raw / temperature, dim=-1).sort(descending=True, stable=True)
        at = _pick(best.double().numpy(), params, float(rows.uniforms[row]), whole=True)
        assert at is not None
        out[row] = ids[at]


REFERENCE = Kernels(reference_ops, reference_sample)


def keep_all(waiting: str, recorded: str) -> bool:
    """Forgets no wait."""
    return False


def settings(**more: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "page_size": PAGE,
        "kv_cache_gib": 0.002,
        "max_batch": 6,
        "max_prefill_tokens": 16,
        "chunk_tokens": 9,
        "cuda": {"look_ahead": 3, "decode_buckets": [1, 3, 6]},
    }
    return EngineConfig.model_validate(values | more)


def recorded_runner(
    model_dir: Path,
    seed: int = 0,
    forget: Forget = keep_all,
    kernels: Kernels = REFERENCE,
    splits: Sequence[Split] = (Split(6, 2), Split(4, 4), Split(2, 6)),
    **more: Any,
) -> tuple[CudaRunner, RecordingStreams]:
    """A page has 4 tokens, a pass of a prefill 16, decode buckets 1, 3 and 6 rows, a burst up to 3 steps. `forget`: once it has
    started."""
    streams = RecordingStreams(seed=seed, splits=splits)
    runner = CudaRunner(model_dir, settings(**more), streams, kernels)
    streams.forget = forget
    return runner, streams
