"""Builds kernels.cpp once per machine and calls it through ctypes: no torch headers, so it compiles in a few seconds.

The library links to the OpenMP runtime that torch has loaded: two runtimes in one process would fight over the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pdmux_ray.cache import cache_folder
from pdmux_ray.errors import ConfigError
from pdmux_ray.model.ops import AttentionBatch, AttentionSpec

_HERE = Path(__file__).parent
_SOURCES = ("kernels.cpp", "attention.h", "rows.h", "vec.h")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wl,--as-needed")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_PANEL = 64  # columns of a packed weight that lie together
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class NativeUnavailableError(ConfigError):
    """The kernels cannot be built or loaded here; the message says what to install."""


class _Step(ctypes.Structure):
    """`Step` of attention.h."""

    _fields_ = [
        *((name, _INT) for name in ("tokens", "sequences", "page_size", "page_table_stride")),
        *((name, _POINTER) for name in ("slots", "query_starts", "context_lengths", "page_table", "cos", "sin", "cos_rows")),
    ]


class _Layer(ctypes.Structure):
    """`Layer` of attention.h."""

    _fields_ = [
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "norm_eps")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "keys", "values")),
    ]


class Linear(ctypes.Structure):
    """`Linear` of kernels.cpp."""

    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("words", _INT), ("outputs", _INT)]


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of kernels.cpp."""

    _fields_ = [
        *((name, _POINTER) for name in ("attention", "input_norm", "post_norm")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
    ]


class Buffers(ctypes.Structure):
    """`Buffers` of kernels.cpp."""

    _fields_ = [(name, _POINTER) for name in ("qkv", "attended", "normed", "gate_up", "inner")]


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """A weight in the layout of kernels.cpp."""

    weight: Tensor
    bias: Tensor | None
    outputs: int


class Kernels:
    """The kernels for one KV pool of `KVLayout.shape`. Tensors are contiguous, of the pool's dtype; no call checks it.

    One thread at a time; two threads that compute at once have one each.
    """

    def __init__(self, library: ctypes.CDLL, pool: Tensor) -> None:
        suffix = _SUFFIX[pool.dtype]
        self._pool, self._page_size = pool, pool.shape[4]
        self._attention = library[f"attention_{suffix}"]
        self._attention.argtypes = [_POINTER] * 4
        self._rms_norm = library[f"rms_norm_{suffix}"]
        self._rms_norm.argtypes = [_POINTER, _POINTER, ctypes.c_float, _INT, _INT, _POINTER]
        self._silu_mul = library[f"silu_mul_{suffix}"]
        self._silu_mul.argtypes = [_POINTER, _INT, _INT, _POINTER]
        self._linear = library[f"linear_{suffix}"]
        self._linear.argtypes = [_POINTER] * 4 + [_INT] * 3 + [_POINTER]
        self._run_layers = library[f"run_layers_{suffix}"]
        self._run_layers.argtypes = [_POINTER, _POINTER, _INT, ctypes.c_float, _INT, _POINTER, _POINTER]
        for function in (self._attention, self._rms_norm, self._silu_mul, self._linear, self._run_layers):
            function.restype = None
        self.linear_is_fast = bool(library[f"linear_is_fast_{suffix}"]())
        self.block_rows = int(library.block_rows())
        self._per_word = 4 // pool.itemsize
        self._layers: dict[int, tuple[AttentionSpec, int, _Layer]] = {}
        self._step: tuple[AttentionBatch, object, int, tuple[object, ...]] | None = None

    def attention(self, layer: int, qkv: Tensor, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> None:
        """q/k norm, RoPE, KV write and attention. `out` [T, NH D]. The queries in `qkv` are overwritten."""
        self._attention(self._step_address(batch, spec), self.layer_address(layer, spec), qkv.data_ptr(), out.data_ptr())

    def run_layers(
        self,
        layers: ctypes.Array[DecoderLayer],
        start: int,
        end: int,
        eps: float,
        hidden: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        buffers: Buffers,
    ) -> None:
        """Layers [start, end) on `hidden` [T, H], in place. `spec` is any of them: its RoPE is that of all."""
        first = ctypes.addressof(layers) + start * ctypes.sizeof(DecoderLayer)
        step, width = self._step_address(batch, spec), hidden.shape[1]
        self._run_layers(step, first, end - start, eps, width, hidden.data_ptr(), ctypes.addressof(buffers))

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] -> [out / 64, words, 64] for `linear`; a word is a float or two neighbouring bfloat16, `in` fills words."""
        outputs, inputs = weight.shape
        if outputs % _PANEL:  # else padding would be a needless copy
            weight = functional.pad(weight, (0, 0, 0, -outputs % _PANEL))
        return weight.view(-1, _PANEL, inputs // self._per_word, self._per_word).transpose(1, 2).contiguous()

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """out [T, out] = x [T, in] times the packed weight, + bias [out], + residual [T, out]; `out` may be `residual`."""
        rows, width = out.shape
        self._linear(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            rows,
            packed.shape[1],
            width,
            out.data_ptr(),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, width = x.shape
        self._rms_norm(x.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        rows, width = out.shape
        self._silu_mul(gate_up.data_ptr(), rows, width, out.data_ptr())

    def layer_address(self, layer: int, spec: AttentionSpec) -> int:
        known = self._layers.get(layer)
        if known is None or known[0] is not spec:
            struct = _Layer(
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                window=spec.window or 0,
                scale=spec.scale,
                norm_eps=spec.norm_eps,
                q_norm=None if spec.q_norm is None else spec.q_norm.data_ptr(),
                k_norm=None if spec.k_norm is None else spec.k_norm.data_ptr(),
                keys=self._pool[layer, 0].data_ptr(),
                values=self._pool[layer, 1].data_ptr(),
            )
            known = self._layers[layer] = (spec, ctypes.addressof(struct), struct)
        return known[1]

    def _step_address(self, batch: AttentionBatch, spec: AttentionSpec) -> int:
        """The step's struct; made once for all layers (they share `batch` and, but for odd models, `spec.rope`)."""
        known = self._step
        if known is None or known[0] is not batch or known[1] is not spec.rope:
            cos, sin, rows = spec.rope.cos, spec.rope.sin, batch.positions
            if cos is None:
                cos, sin = (table.contiguous() for table in spec.rope.cos_sin(batch.positions, batch.rope_lengths))
                rows = torch.arange(len(cos))
            struct = _Step(
                tokens=len(batch.positions),
                sequences=len(batch.context_lengths),
                page_size=self._page_size,
                page_table_stride=batch.page_table.stride(0),
                slots=batch.slots.data_ptr(),
                query_starts=batch.query_starts.data_ptr(),
                context_lengths=batch.context_lengths.data_ptr(),
                page_table=batch.page_table.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                cos_rows=rows.data_ptr(),
            )
            known = self._step = (batch, spec.rope, ctypes.addressof(struct), (struct, cos, sin, rows))
        return known[2]


@cache
def load_library() -> ctypes.CDLL:
    """Builds (once per machine and version) and loads the kernels. Raises NativeUnavailableError."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailableError("no C++ compiler was found; install g++ (Debian, Ubuntu: `apt install g++`) or set CXX")
    try:
        return ctypes.CDLL(str(_build(compiler, _openmp_runtime())))
    except OSError as error:
        raise NativeUnavailableError(f"the CPU kernels cannot be built or loaded: {error}") from error


def _openmp_runtime() -> str:
    """The OpenMP library that torch has loaded into this process."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[-.\w]*)$", text, re.MULTILINE)
    if not found:
        raise NativeUnavailableError(
            "torch has loaded no OpenMP runtime that the CPU kernels could share (Linux builds of torch do)"
        )
    return found[1]


def _build(compiler: str, openmp: str) -> Path:
    """The library's path in $PDMUX_CACHE/kernels (default ~/.cache/pdmux-ray/kernels); safe from several processes at once."""
    from filelock import FileLock

    folder = cache_folder("kernels")
    identity = [compiler, openmp, *_FLAGS, _cpu_identity(), *((_HERE / name).read_text(encoding="utf-8") for name in _SOURCES)]
    target = folder / f"kernels-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            print("compiling the CPU kernels (once, a few seconds)", file=sys.stderr, flush=True)
            _compile(compiler, openmp, target)
    return target


def _compile(compiler: str, openmp: str, target: Path) -> None:
    partial = target.with_suffix(".partial")
    # torch's runtime comes first and satisfies every symbol; the compiler's own copy is then not needed and dropped.
    command = [compiler, *_FLAGS, str(_HERE / "kernels.cpp"), openmp, "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise NativeUnavailableError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-2000:]}")
    partial.rename(target)


def _cpu_identity() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n", 1)[0].splitlines() if info.exists() else []
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
