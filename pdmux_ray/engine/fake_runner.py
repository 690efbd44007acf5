"""A device without a model: time passes as configured, and the next token is a pure function of (seed, tokens so far).

It keeps a "KV" of its own: the entry of a position is a hash over all tokens up to there, written into and read from pages as
a real device would. So a page that is shared, evicted or handed out wrongly changes the tokens, as it would with a model. The
entries lie in the pool as the last layer's values; the rest of it is zero, but travels to other instances as a model's would.

Its lanes run at once, on any clock. What a job writes is garbage to everyone else from the launch of its first block until
`collect_block` has returned for its last: who reads it too early, or is given its pages too early, gets other tokens. A burst
writes each token's KV as late as its step is collected, wherever its pages were at the launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

from kv_transfer.layout import KVLayout
from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, SequenceView, StepBatch, StepOutput, never
from pdmux_ray.engine.timed_blocks import TimedBlocks
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.views import CostModel, Piece
from pdmux_ray.types import SamplingParams, Split, TokenLogprobs

_MASK = 2**61 - 1
_ENTRY_BYTES = 8
_LEAST_S = 1e-9  # a prediction is positive
_BLOCK_S = 0.02  # how often a step with prefills asks whether to give up


def _extend(kv: int, token: int) -> int:
    return (kv * 6364136223846793005 + token + 1442695040888963407) & _MASK


def _token(kv: int, seed: int, vocab_size: int) -> int:
    mixed = (kv ^ seed) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed ^ mixed >> 29) % vocab_size


def fake_token(seed: int, tokens: Sequence[int], vocab_size: int) -> int:
    """What a FakeRunner samples after these tokens."""
    kv = 0
    for token in tokens:
        kv = _extend(kv, token)
    return _token(kv, seed, vocab_size)


def linear_costs(step_s: float, prefill_s_per_token: float, layers: int, units: int) -> FakeCosts:
    """`step_s` for any step and `prefill_s_per_token` for a prefill token in all layers, on the whole device; on half of it
    both take twice as long. Lanes disturb each other only where they share units, and predictions are exact."""
    return FakeCosts(
        units,
        layers,
        fixed_s=0.0,
        weights_s=max(step_s, _LEAST_S),
        request_s=0.0,
        context_s=0.0,
        token_s=prefill_s_per_token,
        pair_s=0.0,
        contention=0.0,
        guard=1.0,
        switch_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a job or a burst reads of a request when it begins. A burst appends its own tokens."""

    request_id: str
    tokens: list[int]
    pages: Sequence[int]
    prompt_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Burst:
    """Decode steps that were launched together. `ready_at_s`: of each that was not collected yet."""

    rows: Sequence[_Snapshot]
    ready_at_s: deque[float]


@dataclass(frozen=True, slots=True)
class _Block:
    """What the end of the block in flight leaves behind: KV as (slot, entry), and its answer."""

    writes: Sequence[tuple[int, int]]
    output: StepOutput | None


class FakeRunner:
    """A `LaneRunner`. What it does takes what `costs` say, counted from its launch. Without them a step in one pass takes
    `step_s` plus `prefill_s_per_token` for each prefill token, and lanes take `linear_costs` of these two."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        step_s: float,
        prefill_s_per_token: float,
        clock: Clock,
        *,
        vocab_size: int = 32_000,
        layers: int = 8,
        units: int = 8,
        most_steps: int = 1,
        costs: CostModel | None = None,
        splits: Sequence[Split] | None = None,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.layers = layers
        self.units = units
        self.most_steps = most_steps
        self.splits = splits or [Split(units - decode_units, decode_units) for decode_units in range(1, units)]
        self.costs: CostModel = costs or linear_costs(step_s, prefill_s_per_token, layers, units)
        self.dtype = "int64"
        self.layout = KVLayout(layers, pages, kv_heads=1, page_size=page_size, head_dim=1, dtype_bytes=_ENTRY_BYTES)
        self.kv_memory = mmap(-1, self.layout.total_bytes)  # takes memory where it is written
        self._kv = memoryview(self.kv_memory).cast("q")[-pages * page_size :]
        self._linear = costs is None
        self._step_s = step_s
        self._prefill_s_per_token = prefill_s_per_token
        self._clock = clock
        self._output: StepOutput | None = None
        self._launched = False
        self._ready_at_s = 0.0
        self._burst: _Burst | None = None
        self._blocks = TimedBlocks(layers, units, clock, lambda *work: self.costs.prefill(*work).predicted_s)
        self._slices: dict[int, Sequence[PrefillSlice]] = {}  # of each job
        self._block: _Block | None = None

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if split is None and self._blocks.in_flight:
            raise RuntimeError("a step on every unit was launched while a block is in flight")
        if self._burst is not None:
            raise RuntimeError(f"{len(self._burst.ready_at_s)} steps of the burst before were not collected")
        if batch.steps > 1:
            self._burst = self._begin_burst(batch, split)
            return
        self._launched, self._output = True, None
        self._ready_at_s = self._clock.now() + self._step_takes_s(batch, split)
        while batch.prefills and (left_s := self._ready_at_s - self._clock.now()) > _BLOCK_S:
            if give_up():
                return
            self._clock.sleep(min(left_s, _BLOCK_S))
        last = [(sequence, self._compute(sequence, len(sequence.tokens) - 1, 1)) for sequence in batch.decodes]
        for piece in batch.prefills:
            kv = self._compute(piece.sequence, piece.start, piece.tokens)
            if piece.sample:
                last.append((piece.sequence, kv))
        self._output = self._sample(last)

    def collect(self) -> StepOutput | None:
        if self._burst is not None:
            return self._step_of(self._burst)
        if not self._launched:
            raise RuntimeError("collect was called without a launched step")
        output, self._output, self._launched = self._output, None, False
        if output is not None:
            self._clock.sleep(self._ready_at_s - self._clock.now())
        return output

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        read = [PrefillSlice(_snapshot(piece.sequence), piece.start, piece.tokens, piece.sample) for piece in slices]
        self._slices[job_id] = read
        self._blocks.open(job_id, [Piece(piece.tokens, piece.start) for piece in read])

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        self._blocks.launch(job_id, end_layer, split)
        slices, done = self._slices[job_id], end_layer == self.layers
        entries = [self._entries(piece.sequence, piece.start, piece.tokens) for piece in slices]
        last = [(piece.sequence, kv[-1][1]) for piece, kv in zip(slices, entries, strict=True) if piece.sample]
        for slot, kv in (entry for piece in entries for entry in piece):
            self._kv[slot] = ~kv & _MASK  # half written
        writes = [(slot, kv if done else ~kv & _MASK) for piece in entries for slot, kv in piece]
        self._block = _Block(writes, self._sample(last) if done else None)

    def block_done(self) -> bool:
        return self._blocks.done

    def collect_block(self) -> StepOutput | None:
        ended = self._blocks.collect()
        if ended is not None:
            del self._slices[ended]
        block, self._block = self._block, None
        assert block is not None
        self._end_block(block.writes)
        return block.output

    @property
    def block_s(self) -> float:
        return self._blocks.block_s

    def drop_job(self, job_id: int) -> None:
        self._blocks.drop(job_id)
        del self._slices[job_id]

    def close(self) -> None:
        self._output, self._launched, self._block, self._burst = None, False, None, None
        self._blocks.clear()
        self._slices.clear()

    def _begin_burst(self, batch: StepBatch, split: Split | None) -> _Burst:
        hosted = [sequence.request_id for sequence in batch.decodes if sequence.params.host_sampled]
        if batch.prefills or hosted or batch.steps > self.most_steps:
            raise RuntimeError(
                f"a burst of {batch.steps} steps with {len(batch.prefills)} prefills was launched, of which the host samples "
                f"{hosted}: there may be {self.most_steps} steps, and nothing else"
            )
        ends_s, ready_at_s = self._clock.now(), deque[float]()
        for step in range(batch.steps):
            ends_s += self._step_takes_s(batch, split, step)
            ready_at_s.append(ends_s)
        return _Burst([_snapshot(sequence) for sequence in batch.decodes], ready_at_s)

    def _step_of(self, burst: _Burst) -> StepOutput:
        """Waits for its next step."""
        self._clock.sleep(burst.ready_at_s.popleft() - self._clock.now())
        output = self._sample([(row, self._compute(row, len(row.tokens) - 1, 1)) for row in burst.rows])
        for row, token in zip(burst.rows, output.tokens, strict=True):
            row.tokens.append(token)
        if not burst.ready_at_s:
            self._burst = None
        return output

    def _end_block(self, writes: Sequence[tuple[int, int]]) -> None:
        """The event that orders the lanes: what the block has written, as (slot, entry), is there for everyone."""
        for slot, kv in writes:
            self._kv[slot] = kv

    def _step_takes_s(self, batch: StepBatch, split: Split | None, step: int = 0) -> float:
        """`step`: of a burst."""
        if split is None and self._linear:
            return self._step_s + sum(piece.tokens for piece in batch.prefills) * self._prefill_s_per_token
        decodes, context_tokens = len(batch.decodes), sum(len(sequence.tokens) + step for sequence in batch.decodes)
        if split is None and batch.prefills:
            pieces = [Piece(piece.tokens, piece.start) for piece in batch.prefills]
            return self.costs.mixed(decodes, context_tokens, pieces, self.units).predicted_s
        units = self.units if split is None else split.decode_units
        return self.costs.decode(decodes, context_tokens, units, self._blocks.units).predicted_s

    def _compute(self, sequence: SequenceView, start: int, count: int) -> int:
        """Writes the KV of tokens [start, start + count) and returns the last one."""
        entries = self._entries(sequence, start, count)
        for slot, kv in entries:
            self._kv[slot] = kv
        return entries[-1][1]

    def _entries(self, sequence: SequenceView, start: int, count: int) -> list[tuple[int, int]]:
        """(slot, KV) of tokens [start, start + count)."""
        tokens, pages, size = sequence.tokens, sequence.pages, self.page_size
        before = start - 1
        kv = self._kv[pages[before // size] * size + before % size] if start else 0
        entries = []
        for position in range(start, start + count):
            kv = _extend(kv, tokens[position])
            entries.append((pages[position // size] * size + position % size, kv))
        return entries

    def _sample(self, last: Sequence[tuple[SequenceView, int]]) -> StepOutput:
        """From the KV of each one's last token."""
        output = StepOutput([_token(kv, sequence.params.seed, self.vocab_size) for sequence, kv in last])
        if any(sequence.params.logprobs is not None for sequence, _ in last):
            output.logprobs = [self._logprobs(s, token) for (s, _), token in zip(last, output.tokens, strict=True)]
        return output

    def _logprobs(self, sequence: SequenceView, token: int) -> TokenLogprobs | None:
        """Made up: the chosen token is the likeliest, the others follow it in id order."""
        count = sequence.params.logprobs
        if count is None:
            return None
        top = tuple(((token + rank) % self.vocab_size, -0.5 - rank) for rank in range(min(count, self.vocab_size)))
        return TokenLogprobs(-0.5, top)


def _snapshot(sequence: SequenceView) -> _Snapshot:
    return _Snapshot(
        sequence.request_id,
        list(sequence.tokens),
        tuple(sequence.pages),
        sequence.prompt_tokens,
        sequence.params,
        sequence.stop_ids,
    )
