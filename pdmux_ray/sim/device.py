"""A device that computes nothing: time passes as its cost model says, and every token is 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from random import Random

from pdmux_ray.clock import Clock
from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, StepBatch, StepOutput, never
from pdmux_ray.engine.timed_blocks import TimedBlocks
from pdmux_ray.policy.look_ahead import Alike
from pdmux_ray.policy.views import Estimate, Piece
from pdmux_ray.types import Split

TOKEN = 0  # that everyone gets in every step


class CostDevice:
    """A `LaneRunner`. What a step takes is what `model.costs` predicts, times what `model.slower` says of such steps, times
    exp(a normal draw of deviation `spread`)."""

    most_steps = 1  # an arrival amid a burst would be seen after it: a simulated step runs at one moment

    def __init__(self, model: DeviceModel, clock: Clock, rng: Random, spread: float = 0.0) -> None:
        self.pages = model.layout.pages
        self.page_size = model.layout.page_size
        self.layers = model.layout.layers
        self.units = model.units
        self.splits = model.splits
        self._costs = model.costs
        self._slower = model.slower
        self._clock = clock
        self._rng = rng
        self._spread = spread
        self._residuals = model.residuals
        self._drawn: deque[float] = deque()  # of the steps that come next, as far as `ends_ahead` has looked
        self._output: StepOutput | None = None
        self._ready_s = 0.0
        self._blocks = TimedBlocks(self.layers, self.units, clock, self._block_takes_s)
        self._answers: dict[int, int] = {}  # of each job, how many

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if split is None and self._blocks.in_flight:
            raise RuntimeError("a step on every unit was launched while a block is in flight")
        self._ready_s = self._clock.now() + self._step_takes_s(batch, split)
        self._output = StepOutput([TOKEN] * (len(batch.decodes) + sum([piece.sample for piece in batch.prefills])))

    def collect(self) -> StepOutput | None:
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError("collect was called without a launched step")
        self._clock.sleep(self._ready_s - self._clock.now())
        return output

    def ends_ahead(self, begin_s: float, decodes: int, context_tokens: int, alike: Alike) -> list[float]:
        """When decode steps by themselves would end that follow one another from `begin_s` on, each with contexts a token
        longer. Nothing is launched; `passed` is to be told how many of them have come to pass."""
        ends_s: list[float] = []
        self._drawn.extend([self._draw() for _ in range(alike.steps - len(self._drawn))])
        for factor in islice(self._drawn, alike.steps):
            if begin_s >= alike.before_s:
                break
            estimate = self._costs.decode(decodes, context_tokens, self.units, 0)
            ready_s = begin_s + self._expected_s("decode", self.units, 0, estimate) * factor
            begin_s += ready_s - begin_s  # as `collect` comes there, to the last bit
            context_tokens += decodes
            ends_s.append(begin_s)
        return ends_s

    def passed(self, steps: int) -> None:
        for _ in range(steps):
            self._drawn.popleft()

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        self._answers[job_id] = sum(piece.sample for piece in slices)
        self._blocks.open(job_id, [Piece(piece.tokens, piece.start) for piece in slices])

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        self._blocks.launch(job_id, end_layer, split)

    def block_done(self) -> bool:
        return self._blocks.done

    def collect_block(self) -> StepOutput | None:
        ended = self._blocks.collect()
        return None if ended is None else StepOutput([TOKEN] * self._answers.pop(ended))

    @property
    def block_s(self) -> float:
        return self._blocks.block_s

    def drop_job(self, job_id: int) -> None:
        self._blocks.drop(job_id)
        del self._answers[job_id]

    def close(self) -> None:
        self._output = None
        self._blocks.clear()
        self._answers.clear()

    def _block_takes_s(self, pieces: Sequence[Piece], layers: int, units: int, beside: int, last: bool) -> float:
        return self._took_s("prefill", units, beside, self._costs.prefill(pieces, layers, units, beside, last))

    def _step_takes_s(self, batch: StepBatch, split: Split | None) -> float:
        decodes, context_tokens = len(batch.decodes), sum([len(sequence.tokens) for sequence in batch.decodes])
        if batch.prefills:
            pieces = [Piece(piece.tokens, piece.start) for piece in batch.prefills]
            return self._took_s("mixed", self.units, 0, self._costs.mixed(decodes, context_tokens, pieces, self.units))
        units, beside = self.units if split is None else split.decode_units, self._blocks.units
        return self._took_s("decode", units, beside, self._costs.decode(decodes, context_tokens, units, beside))

    def _took_s(self, kind: str, units: int, beside: int, estimate: Estimate) -> float:
        factor = self._drawn.popleft() if self._drawn else self._draw()
        return self._expected_s(kind, units, beside, estimate) * factor

    def _expected_s(self, kind: str, units: int, beside: int, estimate: Estimate) -> float:
        return estimate.predicted_s * self._slower.of(kind, units, beside, estimate.predicted_s)

    def _draw(self) -> float:
        if self._residuals:
            return self._rng.choice(self._residuals)
        return self._rng.lognormvariate(0.0, self._spread) if self._spread else 1.0
