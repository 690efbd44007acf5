"""What the checks share: the streams, made once; one model at a time; the device's own rates, which others are held to."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from pdmux_ray.clock import WallClock
from pdmux_ray.device.cuda.answers import SamplingRows
from pdmux_ray.device.cuda.probe import copy_rate, flop_rate
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.startup import Kernels
from pdmux_ray.device.cuda.streams import Stream, Streams, Work
from pdmux_ray.errors import ConfigError, CudaUnavailableError, PdmuxError
from pdmux_ray.gpu_check.models import ModelShape
from pdmux_ray.gpu_check.report import Limit, Row
from pdmux_ray.gpu_check.settings import Multiplex, Settings
from pdmux_ray.gpu_check.sizes import Sizes, sizes_for
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.types import Mode, Split

SPARE_GIB = 6.0  # of the device's memory beside weights and KV: scratch, workspaces, graphs, the driver's own


class SmallDeviceError(PdmuxError):
    """A check's model does not fit into the device's memory, which says nothing of how well it works."""

    def __init__(self, name: str, needed_gib: float, found_gib: float) -> None:
        super().__init__(f"{name} needs {needed_gib:.0f} GiB of GPU memory; this GPU has {found_gib:.0f}")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the whole device, measured: bytes a second read and written by a copy; operations a second of a bf16 product."""

    copy_bytes_per_s: float
    flop_per_s: float


@dataclass
class Lab:
    """Owner: the command, on one thread. `deadline_s`: on `time.monotonic`, when the last check should have ended."""

    streams: Streams
    sizes: Sizes
    folder: Path
    dry: bool  # the streams only record: times mean nothing, and all is float32, as Triton's interpreter knows no bfloat16
    deadline_s: float
    memory_bytes: float = math.inf  # of the device

    def __post_init__(self) -> None:
        self.clock = WallClock()
        self._open: tuple[ModelShape, Settings, CudaRunner] | None = None

    @classmethod
    def open(cls, device: str, quick: bool, folder: Path, deadline_s: float) -> Self:
        """Raises ConfigError when there is no GPU that the device can use."""
        sizes = sizes_for(device, quick)
        if device == "recording":
            return cls(_recording(), sizes, folder, True, deadline_s)
        streams = _of_gpu()
        memory_bytes = torch.cuda.get_device_properties(streams.device).total_memory
        return cls(streams, sizes, folder, False, deadline_s, memory_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def splits(self) -> Sequence[Split]:
        return self.streams.splits

    @cached_property
    def rates(self) -> Rates:
        streams, sizes = self.streams, self.sizes
        copies = [
            copy_rate(streams, streams.whole, sizes.copy_bytes, sizes.timings, by_driver=by_driver)
            for by_driver in (True, False)
        ]
        return Rates(max(copies), flop_rate(streams, streams.whole, sizes.matrix, torch.bfloat16, sizes.timings))

    def settings(self, kv_cache_gib: float, max_batch: int, max_prefill_tokens: int, multiplex: Multiplex) -> Settings:
        """Of a runner with every lane and random weights."""
        return Settings(
            device="cuda",
            dtype=str(self.dtype).removeprefix("torch."),
            load="dummy",
            mode=Mode.AUTO,
            max_batch=max_batch,
            max_prefill_tokens=max_prefill_tokens,
            kv_cache_gib=kv_cache_gib,
            multiplex=multiplex,
        )

    def runner(self, shape: ModelShape, settings: Settings, *, interpreted: bool = False) -> CudaRunner:
        """One is open at a time: it stays until another shape or other settings are asked for. `interpreted`: a dry run takes
        the kernels all the same, in Triton's interpreter, and not plain torch, which is a hundred times as fast there.
        Raises SmallDeviceError."""
        if self._open is not None and self._open[:2] == (shape, settings):
            return self._open[2]
        self.close()
        needed_gib = shape.weight_bytes / 2**30 + (settings.kv_cache_gib or 0.0) + SPARE_GIB
        if needed_gib * 2**30 > self.memory_bytes:
            raise SmallDeviceError(shape.name, needed_gib, self.memory_bytes / 2**30)
        kernels = Kernels(_plain_ops, _best) if self.dry and not interpreted else None
        runner = CudaRunner(shape.write(self.folder / "models"), settings.config, self.streams, kernels, strict=False)
        self._open = (shape, settings, runner)
        return runner

    def close(self) -> None:
        """Frees the model that is open, and what one has left that could not be opened. Safe to call twice."""
        try:
            if self._open is not None:
                self._open[2].close()
        finally:
            self._open = None
            gc.collect()
            self.streams.settle()

    def row(self, limit: Limit, what: str, value: float, unit: str = "", note: str = "") -> Row:
        return limit.row(what, value, unit, judged=not self.dry, note=note)

    def compute(self, work: Work) -> None:
        """On the whole device; returns when it is done."""
        self.streams.settle()
        self.streams.whole.run(work)
        self.streams.whole.record().wait()

    def copy_rate(self, stream: Stream) -> float:
        """Bytes read and written a second by a copy on the stream's SMs."""
        return copy_rate(self.streams, stream, self.sizes.copy_bytes, self.sizes.timings)

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def each_split(self) -> Iterator[tuple[str, Split]]:
        """With a name: SMs of prefill and of decode."""
        for split in self.splits:
            yield f"{split.prefill_units}/{split.decode_units}", split


def _plain_ops(kv_pool: Tensor, scratch: Scratch, sms: int) -> ReferenceOps:
    return ReferenceOps(kv_pool)


def _best(logits: Tensor, rows: SamplingRows, out: Tensor) -> None:
    """Every request of the checks that a dry run does not interpret is greedy."""
    torch.argmax(logits, dim=-1, out=out)


def _recording() -> Streams:
    from pdmux_ray.device.cuda.recording import RecordingStreams

    return RecordingStreams()


def _of_gpu() -> Streams:
    from pdmux_ray.device.cuda.cuda_streams import CudaStreams
    from pdmux_ray.device.cuda.driver import open_driver

    try:
        open_driver()
        if torch.version.cuda is None:
            raise ConfigError(f"torch {torch.__version__} is built without CUDA: install deploy/requirements/gpu.txt.")
        return CudaStreams()
    except CudaUnavailableError as error:
        raise ConfigError(f"{error} `gpu-check --device recording` runs every check without one; it judges no speed.") from None
