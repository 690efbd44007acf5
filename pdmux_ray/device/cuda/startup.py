"""Everything that a runner makes once: weights, buffers, the KV pool and the decode graphs, in the order that memory needs.

Weights first. Then a rehearsal over a pool of two pages, the longest steps on every stream: it compiles the kernels, makes both
lanes' buffers and each stream's cuBLAS workspace, and tells what a graph takes. What is free after that is the pool's; the
graphs come last, because they hold its address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from pdmux_ray.device.cuda.answers import Sample, SamplingRows
from pdmux_ray.device.cuda.graphs import DecodeGraphs, bucket_sizes, capture, warm_up
from pdmux_ray.device.cuda.lane import DecodeLane, StepShape
from pdmux_ray.device.cuda.memory import SPARE_PAGES, allocate, pool_layout, resolve_dtype, smallest_layout
from pdmux_ray.device.cuda.prefill import Forward, PrefillLane
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.streams import Stream, Streams
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder, load_decoder
from pdmux_ray.model.ops import Ops
from pdmux_ray.types import SamplingParams, Split

if TYPE_CHECKING:
    from pdmux_ray.config import EngineConfig  # it needs pydantic, which a machine that only computes may lack
    from pdmux_ray.device.cuda.prefill_backends import MakeAttention

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 64  # of a job's inputs, a token
_LENGTHS = (1024, 256, 64)  # tokens of the prefills that each stream starts with, beside the longest
_NARROWEST = 4  # log2 of the rows of the narrowest decode kernel; `BLOCK_B` of kernels/decode_attention.py


@dataclass(frozen=True, slots=True)
class Kernels:
    """What lanes compute with. `ops(kv_pool, scratch, sms)`: the operations of a lane of so many SMs."""

    ops: Callable[[Tensor, Scratch, int], Ops]
    sample: Sample


def triton_kernels(prefills: MakeAttention | None = None) -> Kernels:
    """This package's own; `prefills`: others for the attention of prefills. Imports triton."""
    from pdmux_ray.device.cuda.kernels.sampling import draw
    from pdmux_ray.device.cuda.ops import CudaOps

    def sample(logits: Tensor, rows: SamplingRows, out: Tensor) -> None:
        draw(logits, rows.uniforms, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out)

    return Kernels(CudaOps if prefills is None else partial(CudaOps, attention=prefills), sample)


def configured_kernels(config: EngineConfig, model: DecoderConfig, device: torch.device, pass_tokens: int) -> Kernels:
    """Raises ConfigError when the attention of prefills is to be a library's that cannot compute it."""
    from pdmux_ray.device.cuda.prefill_backends import Needs, attention_by

    plans = -(-model.context_length // pass_tokens) * len(set(model.windows))
    needs = Needs(device, resolve_dtype(config.dtype, device), config.page_size, model.head_dim, plans)
    return triton_kernels(attention_by(config.cuda.prefill_attention, needs))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner drives. A stream's decoder computes with the SMs that the stream has."""

    dtype: torch.dtype
    layout: KVLayout  # of the pool, the spare page included
    decodes: DecodeLane
    prefills: PrefillLane
    prefill_decoders: dict[Stream, Decoder]
    graphs: DecodeGraphs

    @property
    def usable_pages(self) -> int:
        return self.layout.pages - SPARE_PAGES


def start(
    model_dir: Path, config: EngineConfig, model: DecoderConfig, streams: Streams, kernels: Kernels | None, strict: bool
) -> Parts:
    """`model`: with the context length that is served; `kernels`: None for those that are configured; `strict`: see
    `DecodeGraphs`. Raises what `CudaRunner` raises."""
    dtype = resolve_dtype(config.dtype, streams.device)
    shape = StepShape(bucket_sizes(config.max_batch, config.cuda.decode_buckets), config.cuda.look_ahead, config.page_size)
    wanted_tokens = max(config.max_prefill_tokens, config.chunk_tokens, config.max_batch)
    pass_tokens = min(wanted_tokens, config.max_batch * model.context_length)
    kernels = kernels or configured_kernels(config, model, streams.device, pass_tokens)
    maker = _Maker(
        streams,
        kernels,
        decode_scratch=Scratch(streams.device, dtype, shape.rows, shape.rows),
        prefill_scratch=Scratch(streams.device, dtype, pass_tokens, config.max_batch),
        decodes=DecodeLane(streams, model, shape, kernels.sample),
        prefills=PrefillLane(streams, model, dtype, config.page_size, (pass_tokens, config.max_batch), kernels.sample),
    )
    small = allocate(smallest_layout(config, model, dtype), dtype, streams.device)
    loader = kernels.ops(small, maker.decode_scratch, streams.units)
    weights = load_decoder(model_dir, dtype, loader, config.load, model, streams.device)
    graphs_bytes = maker.rehearse(weights, small, pass_tokens)
    # Tokens of the longest job, and of one that overtakes it, whose sequences may all have long prefixes cached. With more jobs
    # open at once torch asks the driver, which may wait for the device; when that has no memory, the requests of the job that
    # is to be opened end with an error.
    jobs = (max(pass_tokens, model.context_length), pass_tokens)
    tables_bytes = config.max_batch * maker.decodes.most_pages * torch.int32.itemsize
    jobs_bytes = sum(jobs) * (model.hidden * dtype.itemsize + _TOKEN_BYTES) + tables_bytes
    layout = pool_layout(config, model, dtype, streams.free_bytes() - graphs_bytes - jobs_bytes)
    pool = allocate(layout, dtype, streams.device)
    maker.decodes.spare_page = layout.pages - 1
    logger.info("KV pool: %d pages of %d tokens, %.2f GiB", layout.pages, layout.page_size, layout.total_bytes / 2**30)
    decode_decoders, prefill_decoders = maker.decode_decoders(weights, pool), maker.prefill_decoders(weights, pool)
    streams.settle()
    longest, overtaking = (_slices(tokens, model.context_length, config.page_size) for tokens in jobs)
    cached = PrefillSlice(_Nobody(model.context_length, config.page_size), model.context_length - 1, 1, True)
    maker.prefills.reserve([StepBatch([], longest), StepBatch([], [*overtaking, *[cached] * config.max_batch])])
    graphs = DecodeGraphs(streams, maker.decodes, decode_decoders, strict)
    maker.decode_scratch.freeze()
    maker.prefill_scratch.freeze()
    return Parts(dtype, layout, maker.decodes, maker.prefills, prefill_decoders, graphs)


@dataclass
class _Maker:
    streams: Streams
    kernels: Kernels
    decode_scratch: Scratch
    prefill_scratch: Scratch
    decodes: DecodeLane
    prefills: PrefillLane

    def decode_decoders(self, weights: Decoder, pool: Tensor) -> dict[Stream, Decoder]:
        """Of each level: the whole device, and the decode part of every split."""
        levels = (self.streams.whole, *map(self.streams.decode, self.streams.splits))
        return self._decoders(weights, pool, self.decode_scratch, levels)

    def prefill_decoders(self, weights: Decoder, pool: Tensor) -> dict[Stream, Decoder]:
        """Of each level: the whole device, and the prefill part of every split, beside decodes and under them (CAPPED)."""
        units, splits = self.streams.units, self.streams.splits
        shares = [Split(units, units), *splits, *(Split(split.prefill_units, units) for split in splits)]
        return self._decoders(weights, pool, self.prefill_scratch, map(self.streams.prefill, shares))

    def _decoders(self, weights: Decoder, pool: Tensor, scratch: Scratch, levels: Iterable[Stream]) -> dict[Stream, Decoder]:
        return {stream: weights.with_ops(self.kernels.ops(pool, scratch, stream.units)) for stream in dict.fromkeys(levels)}

    def _rehearse_layers(self, forward: Forward, decoder: Decoder, stream: Stream) -> None:
        """One layer of each window, and the last one with what follows it: the others compute alike. Waits."""
        windows = decoder.config.windows
        stream.wait_for(forward.ready)
        for layer in sorted({0, len(windows) - 1, *map(windows.index, windows)}):
            forward.layers = layer
            self.prefills.advance(forward, layer + 1, decoder, stream)
        stream.record().wait()

    def rehearse(self, weights: Decoder, pool: Tensor, pass_tokens: int) -> int:
        """The longest steps of each lane on each of its streams. Returns what the decode graphs are going to take, in bytes."""
        decoders, largest = self.decode_decoders(weights, pool), self.decodes.buckets[self.decodes.shape.rows]
        prefill_decoders = self.prefill_decoders(weights, pool)
        self.streams.settle()
        for stream, decoder in decoders.items():
            warm_up(stream, self.decodes, decoder, largest)
            stream.record().wait()
        shape, context = self.decodes.shape, weights.config.context_length
        steps = [*_mixes(pass_tokens, shape, context), *_lengths(pass_tokens, shape, context)]
        for stream, decoder in prefill_decoders.items():
            for batch in steps:
                self._rehearse_layers(self.prefills.open(batch, None), decoder, stream)
            steps = _lengths(pass_tokens, shape, context)  # other kernels are compiled now
        stream = self.streams.whole
        before = self.streams.free_bytes()
        graph = capture(self.streams, stream, self.decodes, decoders[stream], largest)  # held until its memory is counted
        taken = max(before - self.streams.free_bytes(), 0)
        del graph
        return taken * len(decoders) * len(self.decodes.buckets)


def _mixes(tokens: int, shape: StepShape, context: int) -> list[StepBatch]:
    """Steps of a prefill lane that bring up every kernel and every buffer: decodes of each width that is compiled, the most
    sequences with a prefill among them, and few tokens."""
    few, page_size = min(2, context), shape.page_size
    widths = [2**power for power in range(_NARROWEST, shape.rows.bit_length()) if 2**power < shape.rows]
    decodes = [[_Nobody(1, page_size)] * min(count, tokens) for count in (*widths, shape.rows)]
    mixed = StepBatch(decodes[-1][: min(shape.rows - 1, tokens - few)], _slices(few, context, page_size))
    return [
        mixed,
        *(StepBatch(rows, []) for rows in decodes),
        *(StepBatch([], _slices(n, context, page_size)) for n in (few, 1)),
    ]


def _lengths(tokens: int, shape: StepShape, context: int) -> list[StepBatch]:
    """Prefills of as many tokens as differ in the kernels that cuBLAS takes for them, which depend on a lane's SMs, too."""
    lengths = (tokens, *(length for length in _LENGTHS if length < tokens))
    return [StepBatch([], _slices(length, context, shape.page_size)) for length in lengths]


def _slices(tokens: int, context: int, page_size: int) -> list[PrefillSlice]:
    """So many tokens, of sequences as long as the context and one that is shorter."""
    lengths = [context] * (tokens // context) + ([tokens % context] if tokens % context else [])
    return [PrefillSlice(_Nobody(length, page_size), 0, length, True) for length in lengths]


@dataclass(frozen=True, slots=True)
class _Nobody:
    """A sequence to warm up with: as many zeros as it has tokens, all in page 0."""

    length: int
    page_size: int
    request_id: str = "warm-up"
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()

    @property
    def tokens(self) -> list[int]:
        return [0] * self.length

    @property
    def prompt_tokens(self) -> int:
        return self.length

    @property
    def pages(self) -> list[int]:
        return [0] * -(-self.length // self.page_size)
