"""Runs steps on a GPU whose lanes are green contexts: decodes as captured graphs, prefills by blocks of layers beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdmux_ray.device.cuda.cuda_streams import CudaStreams
from pdmux_ray.device.cuda.prefill import Forward
from pdmux_ray.device.cuda.probe import probe
from pdmux_ray.device.cuda.startup import Kernels, Parts, start
from pdmux_ray.device.cuda.streams import Event, Stream, Streams, ended_if_it_fails
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, StepBatch, StepOutput, never
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.types import Split

if TYPE_CHECKING:  # it needs pydantic, which a machine that only computes may lack
    from pdmux_ray.config import EngineConfig

_LAYERS_AHEAD = 2  # of a step in one pass, launched before the host looks again whether it is still wanted


class Chain:
    """The work of the prefill lane, in order, whatever streams it is on: a new stream waits for the last one."""

    def __init__(self) -> None:
        self.end: Event | None = None
        self._stream: Stream | None = None

    def enter(self, stream: Stream) -> None:
        """Before the lane's next work is put into `stream`."""
        if self.end is not None and stream is not self._stream:
            stream.wait_for(self.end)

    def leave(self, stream: Stream) -> Event:
        """After it: the event of its end."""
        self.end, self._stream = stream.record(), stream
        return self.end


@dataclass(frozen=True, slots=True)
class _Block:
    """Of a job, in flight. `started`, `ended`: the stream reached its work, and passed it."""

    job_id: int
    forward: Forward
    started: Event
    ended: Event


@dataclass(frozen=True, slots=True)
class _OnePass:
    forward: Forward
    ended: Event
    given_up: bool


class CudaRunner:
    """A `LaneRunner`; a unit is a streaming multiprocessor. Owns the weights, the KV pool and the buffers of both lanes.

    The host waits for values only: a step's tokens, and a block's where it samples or `block_s` is asked for. What orders
    memory is events. The work of the prefill lane, to which steps in one pass belong, is a chain (`Chain`). A decode step
    follows the last block that was collected, though that may still run: so pages that a job wrote, or left to others, are
    never read or written too early. Nothing need follow decode steps, at the same split or another, because whoever collects
    one waits for its tokens.

    The pool is device memory, which other instances cannot read and write yet: there is no `kv_memory`, and so no topology.

    `streams`, `kernels`: for machines without a GPU (`recording.RecordingStreams`). `strict`: no kernel of a decode graph may
    be outside its partition; else that is a warning, for a check that goes on to measure where kernels run.

    Raises ConfigError (of which is CudaUnavailableError: no GPU, no driver), UnsupportedModelError, WeightsError, CudaError,
    GraphContextError.
    """

    device = "cuda"

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        streams: Streams | None = None,
        kernels: Kernels | None = None,
        *,
        strict: bool = True,
    ) -> None:
        model = DecoderConfig.from_pretrained(model_dir)
        if config.context_length is not None:
            model = replace(model, context_length=min(model.context_length, config.context_length))
        self._streams = CudaStreams(config.cuda.index, config.cuda.splits) if streams is None else streams
        self.processor = self._streams.name
        self.layers, self.units, self.splits = model.layers, self._streams.units, self._streams.splits
        self.most_steps, self.page_size = config.cuda.look_ahead, config.page_size
        # In a thread that ends then: its cuBLAS handle, and the workspace that the handle has on each stream, go to whoever
        # computes next. Made here they would stay with this thread, and the one that steps would make its own, amid a step.
        with ThreadPoolExecutor(1, thread_name_prefix="cuda-start") as thread:
            parts = thread.submit(start, model_dir, config, model, self._streams, kernels, strict).result()
        self._parts: Parts | None = parts  # None: closed
        self.dtype, self.layout, self.pages = parts.dtype, parts.layout, parts.usable_pages
        prefills = config.cuda.prefill_attention
        self.kernels = "triton" if prefills == "triton" else f"triton, attention of prefills by {prefills}"
        self.settings = f"splits {[(s.prefill_units, s.decode_units) for s in self.splits]}"
        self._whole = Split(self.units, self.units)
        self._prefill_chain = Chain()
        self._decodes_end: Event | None = None
        self._jobs: dict[int, Forward] = {}
        self._block: _Block | None = None  # in flight
        self._collected: tuple[int, Event, Event] | None = None  # job, start and end of the last one, which may still run
        self._to_follow: Event | None = None  # the end of a block that was collected, while no decode step follows it
        self._one_pass: _OnePass | None = None

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        """Decodes: one copy, and for each step a replay and a copy back. A step with prefills is launched layer by layer, and
        `give_up` asked before each, a few layers ahead of the device."""
        parts = self._open()
        if self._one_pass is not None or parts.decodes.busy:
            raise RuntimeError("a step was launched before the one before it was collected")
        if split is None and self._block is not None:
            raise RuntimeError("a step without a split needs every unit, but a block is in flight: collect it first")
        if split is not None and batch.prefills:
            raise ValueError("a step with a split has decodes only; prefills are jobs")
        if batch.prefills:
            self._launch_in_one_pass(parts, batch, give_up)
        else:
            self._launch_decodes(parts, batch, self._streams.whole if split is None else self._streams.decode(split))

    def _launch_decodes(self, parts: Parts, batch: StepBatch, stream: Stream) -> None:
        graph = parts.graphs.of(stream, parts.decodes.bucket_for(len(batch.decodes)))
        if self._to_follow is not None:
            stream.wait_for(self._to_follow)
        self._decodes_end = parts.decodes.launch(batch.decodes, batch.steps, stream, graph)
        self._to_follow = None

    def _launch_in_one_pass(self, parts: Parts, batch: StepBatch, give_up: GiveUp) -> None:
        if batch.steps > 1:
            raise ValueError("a step with prefills is a single one")
        stream, forward = self._streams.prefill(self._whole), parts.prefills.open(batch, self._prefill_chain.end)
        self._prefill_chain.enter(stream)
        stream.wait_for(forward.ready)
        given_up, ahead = False, deque[Event]()
        with ended_if_it_fails(stream):
            for layer in range(self.layers):
                if len(ahead) == _LAYERS_AHEAD:
                    ahead.popleft().wait()
                if given_up := give_up():
                    break
                parts.prefills.advance(forward, layer + 1, parts.prefill_decoders[stream], stream)
                ahead.append(stream.record())
        self._one_pass = _OnePass(forward, self._prefill_chain.leave(stream), given_up)

    def collect(self) -> StepOutput | None:
        step, self._one_pass = self._one_pass, None
        if step is not None:
            step.ended.wait()
            return None if step.given_up else self._open().prefills.read(step.forward)
        output = self._parts.decodes.collect() if self._parts is not None else None
        if output is None:
            raise RuntimeError("collect was called without a launched step")
        return output

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        parts = self._open()
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is open already")
        self._jobs[job_id] = parts.prefills.open(StepBatch([], slices), self._prefill_chain.end)

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        parts, forward = self._open(), self._jobs[job_id]
        if self._block is not None:
            raise RuntimeError(f"a block of job {self._block.job_id} is in flight: collect it before the next")
        if not forward.layers < end_layer <= self.layers:
            raise ValueError(f"job {job_id} is through {forward.layers} of {self.layers} layers; it cannot run to {end_layer}")
        stream = self._streams.prefill(split)
        self._prefill_chain.enter(stream)
        if forward.layers == 0:
            stream.wait_for(forward.ready)
        started = stream.record()
        with ended_if_it_fails(stream):
            parts.prefills.advance(forward, end_layer, parts.prefill_decoders[stream], stream)
        self._block = _Block(job_id, forward, started, self._prefill_chain.leave(stream))

    def block_done(self) -> bool:
        return self._block is None or self._block.ended.done()

    def collect_block(self) -> StepOutput | None:
        """Waits for tokens, when it was a job's last block and samples. Else the device does the waiting: whatever is launched
        from now on that could touch the job's pages follows the block."""
        block, self._block = self._block, None
        if block is None:
            raise RuntimeError("collect_block was called without a block in flight")
        self._collected, self._to_follow = (block.job_id, block.started, block.ended), block.ended
        if block.forward.layers < self.layers:
            return None
        del self._jobs[block.job_id]
        if not block.forward.sampled:
            return StepOutput()
        block.ended.wait()
        return self._open().prefills.read(block.forward)

    @property
    def block_s(self) -> float:
        """See `LaneRunner`; by the device's clock. Waits for the block."""
        if self._collected is None:
            return 0.0
        job_id, started, ended = self._collected
        try:
            ended.wait()
        except Exception:
            self._jobs.pop(job_id, None)
            raise
        return ended.seconds_since(started)

    def drop_job(self, job_id: int) -> None:
        if self._block is not None and self._block.job_id == job_id:
            raise RuntimeError(f"a block of job {job_id} is in flight: collect it first")
        del self._jobs[job_id]

    def probe(self, levels: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(bytes a second, floating point operations a second) of lanes of so many SMs; while nothing is in flight."""
        return probe(self._streams, levels, self.dtype)

    def close(self) -> None:
        """Waits for what is in flight, and frees all but the streams."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        try:
            for end in (self._decodes_end, self._prefill_chain.end, parts.prefills.staged):
                if end is not None:
                    end.wait()
        finally:
            parts.graphs.close()
            self._jobs, self._block, self._collected, self._one_pass = {}, None, None, None

    def _open(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the runner is closed")
        return self._parts
