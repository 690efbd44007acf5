"""A device that computes nothing: time passes as its cost model says, and every token is 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
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
    """A `LaneRunner`. What a step takes is what `model.costs` predicts, times what `model.slower` says of such steps, at the
    speed that `model.pace` has while it runs. Without a pace it is times exp(a normal draw of deviation `spread`) instead.

    The host's time before a step, or before a block, counts as theirs."""

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
        self._host = model.host
        self._pace = model.pace
        self._pace_from_s = rng.uniform(0.0, model.pace.length_s) if model.pace else 0.0  # when the clock is at 0
        self._drawn: deque[float] = deque()  # without a pace: of the steps that come next, as far as `ends_ahead` has looked
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
        pace, host_s = self._pace, self._host.step_s
        for factor in self._ahead(alike.steps):
            if begin_s >= alike.before_s:
                break
            estimate = self._costs.decode(decodes, context_tokens, self.units, 0)
            took_s = self._expected_s("decode", self.units, 0, estimate, decodes) * factor
            if pace is not None:
                took_s = pace.lasts_s(self._pace_from_s + begin_s, took_s)
            ready_s = begin_s + (took_s + host_s)
            begin_s += ready_s - begin_s  # as `collect` comes there, to the last bit
            context_tokens += decodes
            ends_s.append(begin_s)
        return ends_s

    def passed(self, steps: int) -> None:
        for _ in range(min(steps, len(self._drawn))):
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
        estimate = self._costs.prefill(pieces, layers, units, beside, last)
        return self._took_s("prefill", units, beside, estimate, 0) + self._host.lanes_s

    def _step_takes_s(self, batch: StepBatch, split: Split | None) -> float:
        decodes, context_tokens = len(batch.decodes), sum([len(sequence.tokens) for sequence in batch.decodes])
        if batch.prefills:
            pieces = [Piece(piece.tokens, piece.start) for piece in batch.prefills]
            estimate = self._costs.mixed(decodes, context_tokens, pieces, self.units)
            return self._took_s("mixed", self.units, 0, estimate, decodes) + self._host.step_s
        units, beside = self.units if split is None else split.decode_units, self._blocks.units
        estimate = self._costs.decode(decodes, context_tokens, units, beside)
        host_s = self._host.lanes_s if beside else self._host.step_s
        return self._took_s("decode", units, beside, estimate, decodes) + host_s

    def _took_s(self, kind: str, units: int, beside: int, estimate: Estimate, decodes: int) -> float:
        expected_s = self._expected_s(kind, units, beside, estimate, decodes)
        if self._pace is not None:
            return self._pace.lasts_s(self._pace_from_s + self._clock.now(), expected_s)
        return expected_s * (self._drawn.popleft() if self._drawn else self._draw())

    def _expected_s(self, kind: str, units: int, beside: int, estimate: Estimate, decodes: int) -> float:
        return estimate.predicted_s * self._slower.of(kind, units, beside, estimate.predicted_s, decodes)

    def _ahead(self, steps: int) -> Iterable[float]:
        """What the times of so many steps are drawn to be, of what is expected. With a pace nothing is drawn."""
        if self._pace is not None:
            return repeat(1.0, steps)
        self._drawn.extend([self._draw() for _ in range(steps - len(self._drawn))])
        return islice(self._drawn, steps)

    def _draw(self) -> float:
        return self._rng.lognormvariate(0.0, self._spread) if self._spread else 1.0
