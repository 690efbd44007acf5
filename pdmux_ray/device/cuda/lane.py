"""The decode lane: the static buffers of a step, the step itself, and its launch as a replay of a captured graph.

    host: pack ──copy──► [ids, positions, tables, …] ──graph──► [ids + 1 token, positions + 1] ──copy──► host: tokens
                                     ▲                                      │
                                     └────── the next step of a burst ──────┘

Every step leaves its inputs as those of the next one, so a burst is the same graph replayed; where a token's KV goes and how
long its context is follow from its position, on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pdmux_ray.device.cuda.answers import Answers, Sample, SamplingRows, host_sampled
from pdmux_ray.device.cuda.inputs import SAMPLING, Field, Packed, PageTables, fill_sampling, uniforms
from pdmux_ray.device.cuda.streams import Event, Graph, Stream, Streams, ended_if_it_fails
from pdmux_ray.engine.runner import SequenceView, StepOutput
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder
from pdmux_ray.model.ops import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step that a lane takes."""

    buckets: tuple[int, ...]  # batch sizes that there are graphs of, ascending
    most_steps: int  # of a burst
    page_size: int  # tokens

    @property
    def rows(self) -> int:
        return self.buckets[-1]


def _packed(size: int, shape: StepShape, most_pages: int) -> Packed:
    """The inputs of `size` rows."""
    rows = {"token_ids": torch.int64, "positions": torch.int64, "prompts": torch.int64, **SAMPLING}
    fields = {name: Field((size,), dtype) for name, dtype in rows.items()}
    fields["uniforms"] = Field((shape.most_steps, size), torch.float32)
    fields["step"] = Field((1,), torch.int64)  # of the burst, counted by the device
    fields["page_table"] = Field((size, most_pages), torch.int32)
    return Packed(fields)


class Bucket:
    """The tensors of a decode step of `size` rows, of which the last ones may be nobody's. Views of buffers that all buckets
    share: one step runs at a time, and every launch fills them anew."""

    def __init__(self, size: int, lane: DecodeLane) -> None:
        packed = _packed(size, lane.shape, lane.most_pages)
        self.size, self._lane, self._nbytes = size, lane, packed.nbytes
        self.host, tensors = packed.arrays(lane.pinned), packed.tensors(lane.inputs)
        derived = {name: tensor[:size] for name, tensor in lane.derived.items()}
        self._tensors, self._pages, self._offsets = tensors, derived["pages"], derived["offsets"]
        self._uniforms = derived["uniforms"]
        self.token_ids = tensors["token_ids"]
        self.sampling = SamplingRows.of(tensors, derived["uniforms"])
        self.batch = AttentionBatch(
            positions=tensors["positions"],
            slots=derived["slots"],
            query_starts=lane.derived["query_starts"][: size + 1],
            context_lengths=derived["contexts"],
            page_table=tensors["page_table"],
            rope_lengths=derived["rope_lengths"] if lane.model.rope.dynamic else None,
        )

    def receive(self) -> None:
        """Work: the host's inputs, in one copy."""
        self._lane.inputs[: self._nbytes].copy_(self._lane.pinned[: self._nbytes], non_blocking=True)

    def locate(self) -> None:
        """Work: where each token's KV goes and what its context is, from its position."""
        batch, page_size = self.batch, self._lane.shape.page_size
        torch.div(batch.positions, page_size, rounding_mode="floor", out=self._offsets)  # here: the column in the page table
        torch.gather(batch.page_table, 1, self._offsets[:, None], out=self._pages[:, None])
        torch.remainder(batch.positions, page_size, out=self._offsets)
        torch.add(self._offsets, self._pages, alpha=page_size, out=batch.slots)
        torch.add(batch.positions, 1, out=batch.context_lengths)
        if batch.rope_lengths is not None:
            torch.maximum(self._tensors["prompts"], batch.context_lengths, out=batch.rope_lengths)
        torch.index_select(self._tensors["uniforms"], 0, self._tensors["step"], out=self._uniforms[None])

    def go_on(self) -> None:
        """Work: the inputs of the burst's next step; the token ids are those sampled. At the context's end a row stays where it
        is: the host has ended it, and throws away what comes of it."""
        self.batch.positions.add_(1).clamp_(max=self._lane.model.context_length - 1)
        self._tensors["step"].add_(1).clamp_(max=self._lane.shape.most_steps - 1)


@dataclass(slots=True)
class _Burst:
    sequences: Sequence[SequenceView]
    hosted: list[int]
    events: deque[Event]
    step: int = 0  # that is collected next


class DecodeLane:
    """The decode steps of one device, one burst at a time. What levels differ in, stream and decoder, comes from outside."""

    def __init__(self, streams: Streams, model: DecoderConfig, shape: StepShape, sample: Sample) -> None:
        self.model, self.shape = model, shape
        self.most_pages = -(-model.context_length // shape.page_size)
        self.spare_page = 0  # written to by rows that are nobody's, read by nobody; set when the pool is there
        self._sample, self._tables = sample, PageTables()
        rows, device = shape.rows, streams.device
        self.pinned = streams.pinned((_packed(rows, shape, self.most_pages).nbytes,), torch.uint8)
        self.inputs = torch.zeros(len(self.pinned), dtype=torch.uint8, device=device)
        dtypes = {"pages": torch.int32, "offsets": torch.int64, "slots": torch.int64, "uniforms": torch.float32}
        dtypes |= {"contexts": torch.int32, "rope_lengths": torch.int64}
        # What the device makes of each step's inputs (`Bucket.locate`); query_starts stay as they are.
        self.derived = {name: torch.zeros(rows, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        self.derived["query_starts"] = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(rows, model.vocab_size, device=device)
        self._answers = Answers(streams, shape.most_steps, rows, model.vocab_size)
        self._burst: _Burst | None = None
        self.buckets = {size: Bucket(size, self) for size in shape.buckets}

    @property
    def busy(self) -> bool:
        """Whether a burst is not collected."""
        return self._burst is not None

    def bucket_for(self, rows: int) -> Bucket:
        """The smallest that holds so many. Raises ValueError when none does."""
        sizes = self.shape.buckets
        if rows > sizes[-1]:
            raise ValueError(f"{rows} decodes in a step, but the largest bucket has {sizes[-1]}: raise engine.max_batch")
        return self.buckets[sizes[bisect_left(sizes, rows)]]

    def step(self, decoder: Decoder, bucket: Bucket) -> None:
        """Work: one decode step on a level's decoder; what a graph is captured of."""
        bucket.locate()
        hidden = decoder.run_layers(0, self.model.layers, decoder.embed(bucket.token_ids), bucket.batch)
        logits = decoder.logits(hidden, out=self.logits[: bucket.size])
        self._sample(logits, bucket.sampling, bucket.token_ids)
        bucket.go_on()

    def launch(self, sequences: Sequence[SequenceView], steps: int, stream: Stream, graph: Graph) -> Event:
        """Fills the bucket of so many rows and replays `graph`, which is of that bucket and `stream`, `steps` times. Returns
        the end of all of it.

        Not while `busy`. Raises ValueError for more steps than there is room for, or for more than one when a row is sampled on
        the host.
        """
        hosted = host_sampled(sequences)
        most = self.shape.most_steps
        if not 1 <= steps <= (1 if hosted else most):
            raise ValueError(f"a burst of {steps} steps: it may have 1 to {most}, 1 when the host samples a row")
        bucket, rows, events = self.bucket_for(len(sequences)), len(sequences), deque[Event]()
        self._fill(bucket, sequences, steps)
        with ended_if_it_fails(stream):
            stream.run(bucket.receive)
            for step in range(steps):
                stream.replay(graph)
                stream.run(partial(self._answers.send, step, bucket.token_ids[:rows], self.logits, hosted))
                events.append(stream.record())
        self._burst = _Burst(sequences, hosted, events)
        return events[-1]

    def collect(self) -> StepOutput | None:
        """The tokens of the burst's next step, once they are there; None when there is no burst. Whatever raises ends it."""
        burst = self._burst
        if burst is None:
            return None
        try:
            burst.events.popleft().wait()
            output = self._answers.read(burst.step, burst.sequences, burst.hosted)
        except BaseException:
            self._burst = None
            for event in burst.events:  # nothing of the burst is written from now on
                with suppress(Exception):
                    event.wait()
            raise
        burst.step += 1
        if not burst.events:
            self._burst = None
        return output

    def _fill(self, bucket: Bucket, sequences: Sequence[SequenceView], steps: int) -> None:
        """Rows that are nobody's, and what a row has no pages for, lead to the spare page."""
        host, count, page_size = bucket.host, len(sequences), self.shape.page_size
        lengths = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)
        host["token_ids"][:count] = [sequence.tokens[-1] for sequence in sequences]
        host["token_ids"][count:] = 0
        host["positions"][:count] = lengths - 1
        host["positions"][count:] = 0
        host["prompts"][:count] = [sequence.prompt_tokens for sequence in sequences]
        host["step"][:] = 0
        fill_sampling(host, sequences)
        host["temperature"][count:] = 0.0
        seeds = np.array([sequence.params.seed for sequence in sequences], dtype=np.uint64)
        ahead = np.arange(steps, dtype=np.uint64)[:, None]
        host["uniforms"][:steps, :count] = uniforms(seeds, lengths.astype(np.uint64) + ahead)
        columns = min(int(lengths.max() + steps - 2) // page_size + 1, self.most_pages)
        table = host["page_table"][:, :columns]
        table[:] = self.spare_page
        self._tables.begin_step()
        for row, sequence in zip(table, sequences, strict=False):
            pages = self._tables.of(sequence)[:columns]
            row[: len(pages)] = pages
