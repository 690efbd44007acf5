"""Runs steps on the CPU: decodes and prefills together in one forward, or each on its own lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pdmux_ray.config import CPU_KV_CACHE_GIB, EngineConfig
from pdmux_ray.device.base import thread_settings
from pdmux_ray.device.cpu.cores import neighbouring_cores, usable_cores
from pdmux_ray.device.cpu.lane import Forward, Lane
from pdmux_ray.device.cpu.ops import CpuOps, make_ops
from pdmux_ray.device.cpu.workers import PREFILL_NICE, Workers, splits_of, use_threads
from pdmux_ray.device.kv_pool import allocate_on_cpu, layout_for
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, StepBatch, StepOutput, never
from pdmux_ray.errors import ConfigError
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import load_decoder
from pdmux_ray.types import ONE_PASS_MODES, Split


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A block that computes. `result`: what it sampled, and when it ended (time.perf_counter)."""

    job_id: int
    started_s: float
    result: Future[tuple[StepOutput | None, float]]


class CpuRunner:
    """A `LaneRunner`. Owns the weights, the KV pool, and a decode and a prefill lane; a unit is a core.

    `kv_memory`: the pool's bytes (uint8, `layout.total_bytes`), which other instances may read and write. Whoever still has it
    when the runner is closed keeps it from being freed.

    Without a split the calling thread and its own team compute, on all cores. The lanes' workers start with the runner in modes
    that need them, else when first used. Raises ConfigError, UnsupportedModelError or WeightsError when the model cannot be
    loaded or the pool has no page, OSError when a worker may not use its cores.
    """

    device = "cpu"
    most_steps = 1  # the host computes them itself: several at once would save it nothing

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        model = DecoderConfig.from_pretrained(model_dir)
        if config.context_length is not None:
            model = replace(model, context_length=min(model.context_length, config.context_length))
        self.dtype = resolve_dtype(config.dtype)
        self.threads = config.threads or usable_cores()
        self.layers, self.units = model.layers, min(self.threads, usable_cores())
        self.splits = splits_of(self.units)
        kv_gib = config.kv_cache_gib or CPU_KV_CACHE_GIB
        layout = layout_for(kv_gib, model.layers, model.kv_heads, model.head_dim, config.page_size, self.dtype)
        self.layout, self.pages, self.page_size = layout, layout.pages, layout.page_size
        pool = allocate_on_cpu(layout, self.dtype)
        self.kv_memory = pool.view(torch.uint8).reshape(-1).numpy()
        ops = make_ops(pool)
        self.kernels = "native" if isinstance(ops, CpuOps) else "torch"
        self.settings = f"{thread_settings()}, prefills nice {PREFILL_NICE}"
        decoder = load_decoder(model_dir, self.dtype, ops, config.load, model)
        self._decode: Lane | None = Lane(decoder, self.page_size)  # None: closed
        self._prefill: Lane | None = Lane(decoder.with_ops(type(ops)(pool)), self.page_size)
        self._workers: Workers | None = None
        self._step_thread = 0
        self._launched: Forward | Future[StepOutput] | None = None
        self._given_up = False
        self._pass: Forward | None = None  # the one under way, if it has prefills
        self._jobs: dict[int, Forward] = {}
        self._block: _InFlight | None = None
        self.block_s = 0.0
        if config.mode not in ONE_PASS_MODES:
            self._ready_workers()

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        """Without a split computes the layers here; with prefills it asks `give_up` after every layer.

        So it does with one that has every unit for the decodes, while no block is in flight: another thread would have to be
        woken twice, for 10 to 20 % of a step in a server whose gateway shares the cores.
        """
        lane = self._open(self._decode)
        if split is not None and batch.prefills:
            raise ValueError("a step with a split has decodes only; prefills are jobs")
        if split is not None and (self._block is not None or split.decode_units != self.units):
            self._launch_decodes(lane, batch, split)
            return
        if self._block is not None:
            raise RuntimeError("a step without a split needs every unit, but a block is in flight: collect it first")
        self._use_threads()
        forward = lane.begin(batch)
        if batch.prefills:
            self._pass = forward
            self._given_up = not lane.advance_unless(give_up, forward)
            self._pass = None
        else:
            lane.advance(forward, lane.layers)
        self._launched = forward

    @property
    def layers_done(self) -> int:
        """See `LayeredRunner`."""
        return 0 if self._pass is None else self._pass.layers_done

    def _launch_decodes(self, lane: Lane, batch: StepBatch, split: Split) -> None:
        def step() -> StepOutput:
            lane.advance(forward, lane.layers)
            return lane.finish(forward)

        worker, forward = self._ready_workers().decode(split), lane.begin(batch)
        self._launched = worker.submit(step)

    def collect(self) -> StepOutput | None:
        launched, self._launched = self._launched, None
        if launched is None:
            raise RuntimeError("collect was called without a launched step")
        if isinstance(launched, Future):
            return launched.result()
        given_up, self._given_up = self._given_up, False
        return None if given_up else self._open(self._decode).finish(launched)

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is open already")
        self._jobs[job_id] = self._open(self._prefill).begin(StepBatch([], slices))

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        job, lane = self._jobs[job_id], self._open(self._prefill)
        if self._block is not None:
            raise RuntimeError(f"a block of job {self._block.job_id} is in flight: collect it before the next")
        if not job.layers_done < end_layer <= self.layers:
            raise ValueError(f"job {job_id} is through {job.layers_done} of {self.layers} layers; it cannot run to {end_layer}")

        def block() -> tuple[StepOutput | None, float]:
            return lane.block(job, end_layer), time.perf_counter()

        started_s = time.perf_counter()
        self._block = _InFlight(job_id, started_s, self._ready_workers().prefill(split).submit(block))

    def block_done(self) -> bool:
        return self._block is None or self._block.result.done()

    def collect_block(self) -> StepOutput | None:
        block, self._block = self._block, None
        if block is None:
            raise RuntimeError("collect_block was called without a block in flight")
        try:
            output, ended_s = block.result.result()
        except BaseException:
            del self._jobs[block.job_id]
            raise
        self.block_s = ended_s - block.started_s
        if self._jobs[block.job_id].layers_done == self.layers:
            del self._jobs[block.job_id]
        return output

    def drop_job(self, job_id: int) -> None:
        if self._block is not None and self._block.job_id == job_id:
            raise RuntimeError(f"a block of job {job_id} is in flight: collect it first")
        del self._jobs[job_id]

    def close(self) -> None:
        """Waits for what is in flight, and for every thread."""
        if self._workers is not None:
            self._workers.close()
        self._workers = self._decode = self._prefill = self._launched = self._block = self._pass = None
        self._jobs = {}
        self.kv_memory = np.empty(0, dtype=np.uint8)

    def _open(self, lane: Lane | None) -> Lane:
        if lane is None:
            raise RuntimeError("the runner is closed")
        return lane

    def _ready_workers(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(neighbouring_cores()[: self.units])
        return self._workers

    def _use_threads(self) -> None:
        """OpenMP keeps the number of threads per calling thread: it is set in the one that runs steps."""
        if self._step_thread != threading.get_ident():
            use_threads(self.threads)
            self._step_thread = threading.get_ident()


def resolve_dtype(name: str) -> torch.dtype:
    """ "auto" is bfloat16 where the processor multiplies it natively, else float32. Raises ConfigError for float16."""
    if name == "float16":
        raise ConfigError("engine.dtype: float16 is for GPUs; a CPU computes in bfloat16, float32 or what auto finds")
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
