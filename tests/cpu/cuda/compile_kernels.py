"""Compiles every kernel for a GPU that need not be there, as a step of a model launches it. A process of its own, because it
must not be interpreted: `python compile_kernels.py ARCHITECTURE [MODEL ...]`, which prints a JSON object a launch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from pdmux_ray.device.cuda.kernels.rms_norm import rms_norm
from pdmux_ray.device.cuda.kernels.sampling import draw, greedy
from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec
from pdmux_ray.model.rope import Rope, RopeSpec

SMS = 132


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    qk_norm: bool = False


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128),
    "Qwen3-8B, window, float16": Model(32, 8, 128, torch.float16, window=4096, qk_norm=True),
    "64": Model(14, 2, 64),
    "80": Model(32, 32, 80),
    "256": Model(8, 4, 256),
}


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


def launches(work: Callable[[], None]) -> list[Launch]:
    """The kernels that `work` launches, none of which runs."""
    found: list[Launch] = []

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        found.append(Launch(self, arguments, {k: v for k, v in kwargs.items() if k not in self.arg_names}))

    run, JITFunction.run = JITFunction.run, note
    try:
        work()
    finally:
        JITFunction.run = run
    return found


def steps(model: Model) -> None:
    """A decode step, a long prefill and a short one: what a layer launches."""
    rope = Rope(RopeSpec("default", tuple([1.0] * (model.head_dim // 2))), 128)
    norms = [torch.ones(model.head_dim, dtype=model.dtype) if model.qk_norm else None for _ in range(2)]
    spec = AttentionSpec(model.heads, model.kv_heads, model.head_dim, 0.1, model.window, rope, *norms)
    pool = torch.zeros(1, 2, 4, model.kv_heads, 16, model.head_dim, dtype=model.dtype)
    ops = CudaOps(pool, Scratch("cpu", model.dtype, 4096, max_sequences=64), SMS)
    for tokens, sequences in ((32, 32), (4096, 1), (64, 1)):
        ones = torch.ones(tokens, dtype=torch.int64)
        of_sequences = torch.ones(sequences + 1, dtype=torch.int32)
        table = torch.zeros(sequences, 512, dtype=torch.int32)
        batch = AttentionBatch(ones, ones, of_sequences, of_sequences[1:], table)
        qkv = torch.zeros(tokens, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=model.dtype)
        ops.qkv_to_attention(0, qkv, batch, spec)


def others() -> None:
    x, weight = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    rms_norm(x, weight, 1e-5, x)
    CudaOps(torch.zeros(1, 2, 1, 1, 16, 16), Scratch("cpu", torch.bfloat16, 4), SMS).silu_mul(torch.cat([x, x], 1))
    logits, numbers, out = torch.zeros(2, 128256), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    greedy(logits, out)
    draw(logits, numbers, numbers, numbers.int(), numbers, numbers, out)


def compiled(launch: Launch, target: GPUTarget) -> Any:
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (value == 1 if isinstance(value, int) else False):
            signature[parameter.name], constants[(at,)] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
            attributes[(at,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=launch.options)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def report(architecture: int, models: list[str]) -> Iterator[dict[str, Any]]:
    """Of the steps of each model, and of what does not depend on one."""
    target = GPUTarget("cuda", architecture, 32)
    for model, work in ({name: partial(steps, MODELS[name]) for name in models} | {"others": others}).items():
        for launch in launches(work):
            made = compiled(launch, target)
            ptx = made.asm["ptx"]
            yield {
                "model": model,
                "kernel": made.metadata.name,
                "rows": launch.arguments.get("BLOCK_M"),
                "threads": made.metadata.num_warps * 32,
                "shared_bytes": made.metadata.shared,
                "matrix": sorted(set(re.findall(r"wgmma|tcgen05\.mma|mma\.sync", ptx))),
                "copies_16_bytes": bool(
                    re.search(r"cp\.async\.cg\.shared\.global\S* \[[^\]]*\], \[[^\]]*\], (?:0x10|16)", ptx)
                ),
                **usage(made.asm["cubin"]),
            }


if __name__ == "__main__":
    assert not knobs.runtime.interpret
    for line in report(int(sys.argv[1]), sys.argv[2:] or list(MODELS)):
        print(json.dumps(line), flush=True)
