"""Which kernels Triton would compile for the steps of a prefill lane, and which of them the rehearsal leaves out. A process of
its own, because it must not be interpreted: `python count_kernels.py`, which prints a JSON object."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import torch
from compile_kernels import Model, launches
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import create_function_from_signature

from pdmux_ray.device.cuda.inputs import packed_for
from pdmux_ray.device.cuda.lane import StepShape
from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.startup import _lengths, _mixes, _Nobody
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec
from pdmux_ray.model.rope import Rope, RopeSpec

PAGE, CONTEXT, TOKENS, SMS = 16, 4096, 4096, 132
SHAPE = StepShape((1, 40), most_steps=1, page_size=PAGE)
MODEL = Model(32, 8, 128)
_FIELDS = ("positions", "slots", "query_starts", "context_lengths", "page_table")


def mixes(count: int) -> list[StepBatch]:
    """Steps with and without decodes, prefixes and long contexts."""
    rng, found = random.Random(0), []
    for _ in range(count):
        decodes = [_Nobody(rng.randint(1, CONTEXT), PAGE) for _ in range(rng.choice([0, 0, 1, 2, 3, 4, 5, 17, 38]))]
        prefills = []
        for _ in range(rng.randint(1, 2)):
            tokens, start = rng.choice([1, 7, 300, 1024]), rng.choice([0, 0, 16, 500])
            prefills.append(PrefillSlice(_Nobody(start + tokens, PAGE), start, tokens, True))
        found.append(StepBatch(decodes, prefills))
    return found


def kernels(steps: Iterable[StepBatch]) -> set[str]:
    """What distinguishes those that a layer of each step launches."""
    rope = Rope(RopeSpec("default", tuple([1.0] * (MODEL.head_dim // 2))), CONTEXT)
    spec = AttentionSpec(MODEL.heads, MODEL.kv_heads, MODEL.head_dim, 0.1, None, rope, None, None)
    pool = torch.zeros(1, 2, 4, MODEL.kv_heads, PAGE, MODEL.head_dim, dtype=MODEL.dtype)
    ops = CudaOps(pool, Scratch("cpu", MODEL.dtype, TOKENS, max_sequences=SHAPE.rows), SMS)
    found: set[str] = set()
    for step in steps:
        batch = as_sent(StepTensors(step, PAGE, rope_lengths=False).batch)
        qkv = torch.zeros(len(batch.positions), (MODEL.heads + 2 * MODEL.kv_heads) * MODEL.head_dim, dtype=MODEL.dtype)
        for launch in launches(lambda batch=batch, qkv=qkv: ops.qkv_to_attention(0, qkv, batch, spec)):  # type: ignore[misc]
            kernel = launch.kernel
            bind = create_function_from_signature(kernel.signature, kernel.params, BaseBackend)
            _, key, options = bind(**launch.arguments, **launch.options)
            found.add(f"{kernel.__name__} {key} {options}")
    return found


def as_sent(batch: AttentionBatch) -> AttentionBatch:
    """With its tensors where a prefill lane has them."""
    arrays = {name: getattr(batch, name).numpy() for name in _FIELDS}
    packed = packed_for(arrays)
    tensors = packed.tensors(torch.zeros(packed.nbytes, dtype=torch.uint8))
    return AttentionBatch(**tensors, rope_lengths=None, decodes=batch.decodes)


if __name__ == "__main__":
    assert not knobs.runtime.interpret
    rehearsal = [*_mixes(TOKENS, SHAPE, CONTEXT), *_lengths(TOKENS, SHAPE, CONTEXT)]
    rehearsed, met = kernels(rehearsal), kernels(mixes(60))
    print(json.dumps({"rehearsed": len(rehearsed), "met": len(met), "left out": sorted(met - rehearsed)}))
