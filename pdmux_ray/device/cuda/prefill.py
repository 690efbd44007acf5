"""The prefill lane: jobs that run by blocks of layers, and the steps in one pass, which are a job with decodes in it.

A job owns its inputs and its hidden states, from when it is opened until it has ended; what the operations need on their way is
the lane's scratch. When a job has more tokens than that has rows, each layer goes over them in passes, in order: later passes
read what earlier ones wrote of the same layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdmux_ray.device.cuda.answers import Answers, Sample, SamplingRows, host_sampled
from pdmux_ray.device.cuda.inputs import Arrays, Tensors, packed_for, sampling_arrays
from pdmux_ray.device.cuda.streams import Event, Stream, Streams
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import PrefillSlice, SequenceView, StepBatch, StepOutput
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder
from pdmux_ray.model.ops import AttentionBatch

_PARTS = ("positions", "slots", "query_starts", "context_lengths", "page_table", "rope_lengths")  # of an AttentionBatch


def cut(batch: StepBatch, most_tokens: int) -> list[StepBatch]:
    """The same work in passes of at most so many tokens, one at least: decodes in the first, slices cut where one is full."""
    passes: list[StepBatch] = []
    decodes, pieces, room = list(batch.decodes), list[PrefillSlice](), most_tokens - len(batch.decodes)
    for piece in batch.prefills:
        start, end = piece.start, piece.start + piece.tokens
        while start < end:
            if room <= 0:
                passes.append(StepBatch(decodes, pieces))
                decodes, pieces, room = [], [], most_tokens
            tokens = min(end - start, room)
            pieces.append(PrefillSlice(piece.sequence, start, tokens, piece.sample and start + tokens == end))
            start, room = start + tokens, room - tokens
    return [*passes, StepBatch(decodes, pieces)]


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: slice  # of the job's tokens
    batch: AttentionBatch


@dataclass(slots=True)
class Forward:
    """A job, or a step in one pass, on the way through the layers. Tensors are on the device; T tokens, N rows to sample."""

    sampled: Sequence[SequenceView]  # [N], in the order of StepOutput
    hosted: list[int]  # of those, which the host samples
    passes: list[_Pass]
    token_ids: Tensor  # [T] int64
    rows: Tensor  # [N] int64, into T
    sampling: SamplingRows
    hidden: Tensor  # [T, H] after `layers` layers
    ready: Event  # its inputs are there
    layers: int = 0  # launched


class PrefillLane:
    """Opens jobs, and says which work their blocks are. One thread; one block, or step in one pass, at a time."""

    def __init__(
        self, streams: Streams, model: DecoderConfig, dtype: torch.dtype, page_size: int, rows: tuple[int, int], sample: Sample
    ) -> None:
        """`rows`: tokens of a pass, and sequences that may be sampled at once."""
        self._streams, self._model, self._dtype, self._page_size, self._sample = streams, model, dtype, page_size, sample
        self._most_tokens, most_sampled = rows
        self._chosen = torch.zeros(most_sampled, model.hidden, dtype=dtype, device=streams.device)
        self._logits = torch.zeros(most_sampled, model.vocab_size, device=streams.device)
        self._tokens = torch.zeros(most_sampled, dtype=torch.int64, device=streams.device)
        self._answers = Answers(streams, 1, most_sampled, model.vocab_size)
        self.staged: Event | None = None  # what is in `_staging` has been copied
        self._staging = streams.pinned((0,), torch.uint8)

    def reserve(self, batches: Iterable[StepBatch]) -> None:
        """Room for all of these at once: torch keeps what is given back, as it is here, so that opening jobs asks the driver
        for none."""
        for forward in [self.open(batch, None) for batch in batches]:
            forward.ready.wait()

    def _hidden(self, tokens: int) -> Tensor:
        return self._streams.empty((tokens, self._model.hidden), self._dtype)

    def open(self, batch: StepBatch, after: Event | None) -> Forward:
        """Reads the batch's tokens and pages, and sends them to the device. `after`: the end of all whose memory it may get."""
        parts = [StepTensors(part, self._page_size, self._model.rope.dynamic) for part in cut(batch, self._most_tokens)]
        sampled = [sequence for part in parts for sequence in part.sampled]
        ends = np.cumsum([len(part.token_ids) for part in parts])
        starts = [0, *ends[:-1].tolist()]
        arrays: Arrays = {
            "token_ids": np.concatenate([part.token_ids.numpy() for part in parts]),
            "rows": np.concatenate([part.rows.numpy() + start for part, start in zip(parts, starts, strict=True)]),
            **sampling_arrays(sampled),
        }
        for at, part in enumerate(parts):
            tensors = {name: getattr(part.batch, name) for name in _PARTS}
            arrays |= {f"{name} {at}": tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
        device, ready = self._send(arrays, after)
        hidden = self._hidden(int(ends[-1]))
        passes = [_Pass(slice(starts[at], int(ends[at])), _batch_of(device, at, part.batch)) for at, part in enumerate(parts)]
        sampling = SamplingRows.of(device, device["uniforms"])
        return Forward(sampled, host_sampled(sampled), passes, device["token_ids"], device["rows"], sampling, hidden, ready)

    def advance(self, forward: Forward, end: int, decoder: Decoder, stream: Stream) -> None:
        """Launches the layers up to `end`; after the last one also the sampling."""
        stream.run(partial(self._layers, forward, forward.layers, end, decoder))
        forward.layers = end
        if end == self._model.layers and forward.sampled:
            stream.run(partial(self._choose, forward, decoder))

    def read(self, forward: Forward) -> StepOutput:
        """The tokens of one that is through all layers, once the stream is past it."""
        return self._answers.read(0, forward.sampled, forward.hosted)

    def _layers(self, forward: Forward, start: int, end: int, decoder: Decoder) -> None:
        """Work. A step in one pass takes its layers together, else every layer has all passes before the next one begins."""
        passes = forward.passes
        if start == 0:
            for part in passes:
                forward.hidden[part.rows].copy_(decoder.embed(forward.token_ids[part.rows]))
        ranges = [(start, end)] if len(passes) == 1 else [(layer, layer + 1) for layer in range(start, end)]
        for first, last in ranges:
            for part in passes:
                hidden = forward.hidden[part.rows]
                after = decoder.run_layers(first, last, hidden, part.batch)
                if after.data_ptr() != hidden.data_ptr():  # operations that do not work in place
                    hidden.copy_(after)

    def _choose(self, forward: Forward, decoder: Decoder) -> None:
        """Work."""
        count = len(forward.sampled)
        chosen, logits, tokens = self._chosen[:count], self._logits[:count], self._tokens[:count]
        torch.index_select(forward.hidden, 0, forward.rows, out=chosen)
        decoder.logits(chosen, out=logits)
        self._sample(logits, forward.sampling, tokens)
        self._answers.send(0, tokens, logits, forward.hosted)

    def _send(self, arrays: Arrays, after: Event | None) -> tuple[Tensors, Event]:
        """The arrays on the device, and the event of their arrival: one copy, on a stream of its own."""
        packed = packed_for(arrays)
        if self.staged is not None:
            self.staged.wait()  # the last job's copy, which as a rule was over before that job's first block
        if len(self._staging) < packed.nbytes:
            self._staging = self._streams.pinned((packed.nbytes,), torch.uint8)
        for name, target in packed.arrays(self._staging).items():
            target[...] = arrays[name]
        inputs = self._streams.empty((packed.nbytes,), torch.uint8)
        source, copies = self._staging[: packed.nbytes], self._streams.copies
        if after is not None:
            copies.wait_for(after)
        copies.run(partial(_copy, source, inputs))
        self.staged = copies.record()
        return packed.tensors(inputs), self.staged


def _batch_of(tensors: Tensors, at: int, host: AttentionBatch) -> AttentionBatch:
    """Of pass `at`, from the names that `open` gave. `host`: the same on the host."""
    return AttentionBatch(
        positions=tensors[f"positions {at}"],
        slots=tensors[f"slots {at}"],
        query_starts=tensors[f"query_starts {at}"],
        context_lengths=tensors[f"context_lengths {at}"],
        page_table=tensors[f"page_table {at}"],
        rope_lengths=tensors.get(f"rope_lengths {at}"),
        decodes=host.decodes,
        host=host,
    )


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
