"""A device of known laws: a typed `LaneRunner` on a virtual clock whose steps take what a formula says, times some noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, StepBatch, StepOutput, never
from pdmux_ray.latency.design import DesignLimits
from pdmux_ray.latency.identity import Identity
from pdmux_ray.latency.run import Machine
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Split

Tell = Callable[[float, float, str], None]

IDENTITY = Identity(
    model="lawful, config 0",
    device="a formula (2 cores)",
    units=2,
    dtype="bfloat16",
    tensor_parallel=1,
    page_size=16,
    torch="none",
    kernels="none",
)
SPLITS = (Split(1, 1),)
LIMITS = DesignLimits(
    units=2,
    splits=SPLITS,
    max_batch=16,
    context_length=4096,
    pool_tokens=1024 * 16,
    page_size=16,
    chunk_tokens=256,
    max_new_tokens=512,
)


@dataclass
class Law:
    """Seconds. Everything but the fixed parts falls as the units grow; beside the other lane everything but them is longer."""

    fixed_s: float = 0.001
    weights_s: float = 0.020
    request_s: float = 0.0005
    context_s: float = 4e-7
    launch_s: float = 0.0005
    layer_s: float = 0.001
    token_s: float = 2e-5
    pair_s: float = 5e-9
    head_s: float = 0.002
    beside: float = 1.3
    shared: float = 1.8  # and more so, when both lanes use a unit
    layers: int = 12
    units: int = 2
    noise: float = 0.03  # of the log of a time
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def decode_s(self, batch: int, context: int, units: int, beside: int) -> float:
        rest = self.weights_s / units + self.request_s * batch / units + self.context_s * context / units
        return self.fixed_s + rest * self._stretch(units, beside)

    def block_s(self, pieces: Sequence[Piece], layers: int, last: bool, units: int, beside: int) -> float:
        new = sum(piece.new_tokens for piece in pieces)
        pairs = sum(n * (n + 1) / 2 + n * r for n, r in pieces)
        rest = layers * (self.layer_s + self.token_s * new + self.pair_s * pairs) + self.head_s * last
        return self.launch_s + rest / units * self._stretch(units, beside)

    def mixed_s(self, batch: int, context: int, pieces: Sequence[Piece]) -> float:
        return self.decode_s(batch, context, self.units, 0) + self.block_s(pieces, self.layers, True, self.units, 0)

    def noisy(self, seconds: float) -> float:
        return seconds * self.rng.lognormvariate(0.0, self.noise)

    def _stretch(self, units: int, beside: int) -> float:
        if not beside:
            return 1.0
        return self.shared if units + beside > self.units else self.beside


@dataclass
class _Flight:
    job: int
    pieces: Sequence[Piece]
    begin: int  # layers
    end: int
    units: int
    began_s: float
    ready_s: float = 0.0  # 0: it is not known yet what runs beside it


class LawfulRunner:
    """`LaneRunner`. A block is beside the decodes that are launched before anyone asks for it."""

    most_steps = 1

    def __init__(self, law: Law, clock: VirtualClock, pages: int = 1024, stop_after: int | None = None) -> None:
        self.law, self.clock = law, clock
        self.pages, self.page_size = pages, 16
        self.layers, self.units, self.splits = law.layers, law.units, SPLITS
        self.jobs: dict[int, tuple[list[Piece], int]] = {}
        self.block_s = 0.0
        self.slow_until_s = 0.0  # something else uses the units until then
        self.steps_left = stop_after
        self._flight: _Flight | None = None
        self._step: tuple[StepBatch, Split | None, float] | None = None

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise KeyboardInterrupt
        self._step = batch, split, self.clock.now()

    def collect(self) -> StepOutput:
        """A step is beside a block that was in flight at its launch, or that was launched before this."""
        assert self._step is not None
        if self._flight:
            self._land(self._flight)
        (batch, split, began_s), self._step = self._step, None
        context = sum(len(sequence.tokens) for sequence in batch.decodes)
        if batch.prefills:
            assert split is None
            assert self._flight is None
            seconds = self.law.mixed_s(len(batch.decodes), context, pieces_of(batch.prefills))
        else:
            beside = split.prefill_units if split and self._flight else 0
            seconds = self.law.decode_s(len(batch.decodes), context, split.decode_units if split else self.units, beside)
        if began_s < self.slow_until_s:
            seconds *= 1.7
        self.clock.sleep(began_s + self.law.noisy(seconds) - self.clock.now())
        return StepOutput()

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        assert job_id not in self.jobs
        self.jobs[job_id] = pieces_of(slices), 0

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        assert self._flight is None
        pieces, done = self.jobs[job_id]
        self._flight = _Flight(job_id, pieces, done, end_layer, split.prefill_units, self.clock.now())

    def block_done(self) -> bool:
        return self._flight is None or self._land(self._flight) <= self.clock.now()

    def _land(self, flight: _Flight) -> float:
        """When the block ends."""
        if not flight.ready_s:
            _, split, _ = self._step or (None, None, 0.0)
            last, beside = flight.end == self.layers, split.decode_units if split else 0
            seconds = self.law.block_s(flight.pieces, flight.end - flight.begin, last, flight.units, beside)
            flight.ready_s = flight.began_s + self.law.noisy(seconds)
        return flight.ready_s

    def collect_block(self) -> StepOutput | None:
        assert self._flight is not None
        self._land(self._flight)
        flight, self._flight = self._flight, None
        self.clock.sleep(flight.ready_s - self.clock.now())
        self.block_s = flight.ready_s - flight.began_s
        if flight.end == self.layers:
            del self.jobs[flight.job]
            return StepOutput()
        self.jobs[flight.job] = self.jobs[flight.job][0], flight.end
        return None

    def drop_job(self, job_id: int) -> None:
        assert self._flight is None or self._flight.job != job_id
        del self.jobs[job_id]

    def close(self) -> None:
        assert not self.jobs


def pieces_of(slices: Sequence[PrefillSlice]) -> list[Piece]:
    return [Piece(piece.tokens, piece.start) for piece in slices]


def machine(clock: VirtualClock, others_s: Callable[[], float] = lambda: 0.0, tell: Tell = lambda *told: None) -> Machine:
    def probe(levels: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(10e9 * level for level in levels), tuple(100e9 * level for level in levels)

    return Machine(probe, others_s, 2, clock, tell)
