"""The step loop of a device with lanes: decodes on one, a block of a prefill's layers on the other.

    receive → plan → launch the block → launch the decodes → collect the decodes → collect the block, if it is done → publish

A decode waits for the block in flight when it needs units that the block holds, or for a moment when the block is about to end
(`LaneUse.wait_s`). A step without decodes waits for its block. TIME_SHARED: the block follows the decodes, each has every unit,
and the step ends with the block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

from pdmux_ray.clock import Clock
from pdmux_ray.engine.admission import Admitter
from pdmux_ray.engine.jobs import Job
from pdmux_ray.engine.lanes import LaneScheduler
from pdmux_ray.engine.loop import Publish, StepLoop, device_failure
from pdmux_ray.engine.runner import LaneRunner, StepBatch, never
from pdmux_ray.errors import PdmuxError
from pdmux_ray.policy.decisions import LaneUse, StepPlan, StepReason
from pdmux_ray.policy.views import CostModel, Estimate, LearningCostModel, Piece
from pdmux_ray.types import Mode

logger = logging.getLogger(__name__)

POLL_S = 1e-4  # how often is looked whether a block has ended that is waited for


class LaneLoop(StepLoop):
    """Drives a `LaneScheduler` and a `LaneRunner`. `costs` is told what each step took, if it wants to know."""

    def __init__(
        self,
        device: LaneRunner,
        lanes: LaneScheduler,
        publish: Publish,
        clock: Clock,
        stall_timeout_s: float,
        costs: CostModel | None,
        admitter: Admitter | None,
    ) -> None:
        super().__init__(device, lanes, publish, clock, stall_timeout_s)
        self._admitter = admitter
        self._device = device
        self._lanes = lanes
        self._model = costs
        self._costs = costs if isinstance(costs, LearningCostModel) else None
        self._steps_beside = 0  # of the burst under way: began while the block in flight ran

    @property
    def step_age_s(self) -> float:
        """Seconds since the step under way began, or the block in flight if that is older; 0 while there is neither."""
        job = self._lanes.in_flight
        flight = job.flight if job is not None else None
        return max(super().step_age_s, self._clock.now() - flight.launched_s if flight is not None else 0.0)

    @property
    def queued_prefill_tokens(self) -> int:
        """Of jobs that have begun, what their layers that are left come to."""
        queued = super().queued_prefill_tokens
        if not queued:
            return 0
        kept = [(job, piece) for job in self._lanes.jobs for piece in job.slices if piece.sequence not in job.gone]
        done = sum([job.layers_done * piece.tokens for job, piece in kept])
        return max(queued - done // self._lanes.layers, 0)

    def _receive(self, now: float) -> None:
        super()._receive(now)
        if not self._lanes.requests:
            self._collect_block()  # nobody waits for it, and nothing else will run
        self._drop_jobs()
        if self._admitter is not None:
            self._admitter.look()

    def _estimates(self, plan: StepPlan, begin_s: float, ends_s: Sequence[float]) -> Sequence[Estimate | None]:
        """As policies have them for decodes alone; and what each step took is learned."""
        if self._model is None:
            return super()._estimates(plan, begin_s, ends_s)
        found, units, decodes = [], self._lanes.units, len(plan.decode)
        context_tokens = sum([len(self._lanes.requests[request_id].tokens) for request_id in plan.decode])
        for end_s in ends_s:
            found.append(self._model.decode(decodes, context_tokens, units, 0))
            if self._costs is not None:
                self._costs.observe_decode(decodes, context_tokens, units, 0, end_s - begin_s)
            context_tokens, begin_s = context_tokens + decodes, end_s
        return found

    def _given(self, plan: StepPlan) -> list[Estimate]:
        """With the block in flight, for which the step may wait."""
        job = self._lanes.in_flight
        block_s = job.flight.use.block_s if job is not None and job.flight is not None else None
        return [*plan.estimates, block_s] if block_s is not None else plan.estimates

    def _carry_out(self, plan: StepPlan, now: float) -> None:
        lanes = self._lanes
        if lanes.must_land(plan):
            self._collect_block()
            now = self._clock.now()
            plan = lanes.plan(now)
            if plan.reason is StepReason.IDLE:
                return
            lanes.handoffs.busy(self._longest_s(self._given(plan)))
        batch, use = lanes.apply(plan, now), plan.lanes
        self._drop_jobs()
        if use is None or batch.prefills:
            self._run_in_one_pass(plan, batch)
            return
        at_once = use.mode is not Mode.TIME_SHARED
        if at_once:
            self._launch_block(use, batch)
        if batch.decodes:
            self._decode(plan, use, batch)
        else:
            self._lanes.counters.steps += 1  # others are counted with their tokens
        if not at_once:
            self._publish_events()
            self._launch_block(use, batch)
        if not (at_once and batch.decodes) or self._wait_for_block(use.wait_s):
            self._collect_block()

    def _wait_for_block(self, seconds: float) -> bool:
        """Whether the block in flight has ended. One that is due within so many seconds is waited for, and no longer."""
        until_s = self._clock.now() + seconds
        if self._due_s() <= until_s:
            self._publish_events()
            while self._clock.now() < until_s and not self._device.block_done():
                self._clock.sleep(POLL_S)
        return self._device.block_done()

    def _due_s(self) -> float:
        """When the block in flight is predicted to end; never, when nobody predicts it or there is none."""
        ends_s = self._lanes.in_flight.ends_s if self._lanes.in_flight else None
        return math.inf if ends_s is None else ends_s

    def _run_in_one_pass(self, plan: StepPlan, batch: StepBatch) -> None:
        context_tokens = _context_tokens(batch)
        took_s = self._compute(plan, batch, partial(self._device.launch, batch, partial(self._give_up, batch)))
        units = self._lanes.units
        if not batch.prefills:
            self._observe_decodes(batch, context_tokens, units, 0, took_s)  # as such it was predicted
        elif took_s and self._costs is not None:
            pieces = [Piece(piece.tokens, piece.start) for piece in batch.prefills]
            self._costs.observe_mixed(len(batch.decodes), context_tokens, pieces, units, took_s[0])

    def _decode(self, plan: StepPlan, use: LaneUse, batch: StepBatch) -> None:
        flight = self._lanes.in_flight.flight if self._lanes.in_flight else None
        prefill_units = flight.use.split.prefill_units if flight else 0
        context_tokens, self._steps_beside = _context_tokens(batch), 1
        took_s = self._compute(plan, batch, partial(self._device.launch, batch, never, use.split))
        self._observe_decodes(batch, context_tokens, use.split.decode_units, prefill_units, took_s)

    def _amid_burst(self, plan: StepPlan) -> None:
        if not self._device.block_done():
            self._steps_beside += 1
        super()._amid_burst(plan)

    def _observe_decodes(
        self, batch: StepBatch, context_tokens: int, units: int, prefill_units: int, took_s: Sequence[float]
    ) -> None:
        """Each step of a burst with its own time, and every context a token longer than in the one before. A step that began
        after the block beside had ended was by itself."""
        if self._costs is None:
            return
        decodes = len(batch.decodes)
        for step, seconds in enumerate(took_s):
            beside = prefill_units if step < self._steps_beside else 0
            self._costs.observe_decode(decodes, context_tokens + step * decodes, units, beside, seconds)

    def _launch_block(self, use: LaneUse, batch: StepBatch) -> None:
        if use.block is None:
            return
        beside_units = use.split.decode_units if batch.decodes and use.mode is not Mode.TIME_SHARED else 0
        job = self._lanes.begin_block(use, beside_units, self._clock.now())
        opened = job.layers_done > 0
        try:
            if not opened:
                self._device.open_job(job.job_id, job.slices)
                opened = True
            self._device.launch_block(job.job_id, job.end_layer, use.split)
        except Exception as error:
            self._lanes.fail_block(device_failure(error), self._clock.now())
            if opened:
                self._device.drop_job(job.job_id)

    def _collect_block(self) -> None:
        """Waits for the block in flight, if there is one, and takes in what it computed: from now on others may read that.

        A device that orders its lanes itself returns a block before it has ended; then the question what it took waits. So it
        is asked by design: a plan that follows is made at a time when those units are free, and every block corrects the costs.
        """
        job = self._lanes.in_flight
        if job is None:
            return
        try:
            output, seconds = self._device.collect_block(), self._device.block_s
        except Exception as error:
            self._lanes.fail_block(device_failure(error), self._clock.now())
            return
        self._note_block(job, seconds)
        self._lanes.end_block(output, self._clock.now())
        self._drop_jobs()

    def _note_block(self, job: Job, seconds: float) -> None:
        flight = job.flight
        assert flight is not None
        tokens = sum([piece.new_tokens for piece in job.pieces])
        self._lanes.timeline.block(
            flight.use, job.job_id, flight.first_layer, tokens, flight.launched_s, flight.launched_s + seconds
        )
        if self._costs is not None:
            layers = job.end_layer - flight.first_layer
            units = flight.use.split.prefill_units
            last = job.end_layer == self._lanes.layers
            self._costs.observe_prefill(job.pieces, layers, units, flight.beside_units, last, seconds)

    def _drop_jobs(self) -> None:
        for job_id in self._lanes.take_dropped():
            self._device.drop_job(job_id)

    def end_all(self, error: PdmuxError) -> None:
        """As always, but only when the device writes no more."""
        with self._stepping:
            try:
                self._collect_block()
            except Exception:
                logger.critical("the block in flight could not be ended in order", exc_info=True)
            super().end_all(error)
            self._drop_jobs()


def _context_tokens(batch: StepBatch) -> int:
    """Of its decodes, before their new tokens are appended."""
    return sum([len(sequence.tokens) for sequence in batch.decodes])
