"""The scheduler of a device with two lanes: prefills run as jobs, block after block, beside the decodes.

    plan() -> StepPlan    apply(plan) -> StepBatch    begin_block(use) -> Job    end_block(output) | fail_block(error)

A job's requests are in phase PREFILL until its last block has ended; nobody else may read what it wrote before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from pdmux_ray.engine.handoffs import Handoffs
from pdmux_ray.engine.jobs import Flight, Job
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.engine.pages import PagePool
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import LaneRunner, StepBatch, StepOutput
from pdmux_ray.engine.scheduler import Scheduler, results_of
from pdmux_ray.engine.timeline import Timeline
from pdmux_ray.errors import IntegrityError, PdmuxError
from pdmux_ray.policy.decisions import Chunk, LaneUse, StepPlan, StepReason
from pdmux_ray.policy.look_ahead import NONE_ALIKE, Alike
from pdmux_ray.policy.views import LanesView
from pdmux_ray.types import Mode, Phase, Split

Planner = Callable[[LanesView], StepPlan]


class LaneScheduler(Scheduler):
    """A `Scheduler` that implements `policy.views.LanesView`."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: PagePool,
        timeline: Timeline,
        handoffs: Handoffs,
        device: LaneRunner,
        planner: Planner,
    ) -> None:
        super().__init__(limits, pool, timeline, handoffs)
        self.layers = device.layers
        self.units = device.units
        self.splits: Sequence[Split] = device.splits
        self.split = Split(device.units, device.units)
        self.mode: Mode = limits.mode if limits.mode is not Mode.AUTO else Mode.TIME_SHARED
        self.mode_since_s = -math.inf
        self.jobs: list[Job] = []
        self.in_flight: Job | None = None  # the one of `jobs` with a block in flight
        self._planner = planner
        self._begun = 0  # jobs
        self._dropped: list[int] = []

    @property
    def lane_units(self) -> dict[str, int]:
        """What each lane works on now; of a step in one pass both have every unit. From any thread."""
        job, split = self.in_flight, self.split
        flight = job.flight if job is not None else None
        prefill_units = split.prefill_units if self.mode is Mode.CHUNKED and self.prefilling else 0
        if flight is not None:
            prefill_units = flight.use.split.prefill_units
        return {"prefill": prefill_units, "decode": split.decode_units if self.decoding else 0}

    def must_land(self, plan: StepPlan) -> bool:
        """Whether the plan's decodes need units that the block in flight holds."""
        job = self.in_flight
        if job is None or job.flight is None or not (plan.decode or plan.prefill):
            return False
        use = plan.lanes
        if use is None or plan.prefill:
            return True
        return use.mode is not Mode.CAPPED and job.flight.use.split.prefill_units + use.split.decode_units > self.units

    def apply(self, plan: StepPlan, now: float) -> StepBatch:
        for request_id in plan.preempt:
            self._break_up(self.requests[request_id])
        use = plan.lanes
        mode = use.mode if use else Mode.CHUNKED
        if mode is not self.mode:
            self.mode, self.mode_since_s = mode, now
        self.split = use.split if use else Split(self.units, self.units)
        return super().apply(plan, now)

    def begin_block(self, use: LaneUse, beside_units: int, now: float) -> Job:
        """The job of the step's block, which counts as in flight from now on. Raises IntegrityError when it does not fit."""
        block = use.block
        assert block is not None
        begun = None if block.job_id is None else self._find(block.job_id)
        done = begun.layers_done if begun else 0
        if self.in_flight is not None or not done < block.end_layer <= self.layers:
            flying = f"job {self.in_flight.job_id}" if self.in_flight else "nothing"
            raise IntegrityError(f"{block} does not fit: {done} of {self.layers} layers are done, and {flying} is in flight")
        job = begun or self._begin(block.chunks)
        job.end_layer = block.end_layer
        job.flight = Flight(use, job.layers_done, beside_units, now)
        self.in_flight = job
        return job

    def end_block(self, output: StepOutput | None, now: float) -> None:
        """Takes in the block in flight, which has ended: with its job's tokens when it was the last one."""
        first_layer, job = self._land()
        if (output is not None) != (job.layers_done == self.layers):
            raise IntegrityError(f"job {job.job_id} answered {output} after {job.layers_done} of {self.layers} layers")
        self._count_waiting(now)
        kept = [piece for piece in job.slices if piece.sequence not in job.gone]
        self._report(kept, range(first_layer, job.layers_done))
        if output is None:
            if not job.wanted:
                self._drop(job)
            return
        sampled = [piece for piece in job.slices if piece.sample]
        answers = zip(sampled, results_of(output, len(sampled)), strict=True)
        results = [result for piece, result in answers if piece.sequence not in job.gone]
        self._remove(job)
        self._commit_prefills(kept, results, now)
        self.counters.generated_tokens += len(results)

    def fail_block(self, error: PdmuxError, now: float) -> None:
        """Ends the requests of the block in flight, and its job."""
        _, job = self._land()
        self._remove(job)
        self.fail([request for request in job.requests if request not in job.gone], error, now)

    def take_dropped(self) -> list[int]:
        """Jobs that the device must forget, since the last call; no block of them is in flight."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        super().check_integrity()
        flying = [job for job in self.jobs if job.in_flight]
        if flying != ([self.in_flight] if self.in_flight else []):
            raise IntegrityError(f"{len(flying)} jobs are in flight, but the one noted is {self.in_flight}")
        seen: set[int] = set()
        for job in self.jobs:
            for request in job.requests:
                if id(request) in seen or (request.phase is not Phase.PREFILL and request not in job.gone):
                    raise IntegrityError(f"{request.phase.value} request {request.request_id} is in job {job.job_id}")
                seen.add(id(request))
            if not job.wanted and not job.in_flight:
                raise IntegrityError(f"nobody waits for job {job.job_id}, but it was not dropped")

    def steps_alike(self, plan: StepPlan) -> Alike:
        return NONE_ALIKE if self.jobs else super().steps_alike(plan)

    def _count(self, plan: StepPlan, steps: int) -> None:
        super()._count(plan, steps)
        use = plan.lanes
        self.counters.steps_by_mode[use.mode if use else Mode.CHUNKED] += steps
        why = use.why if use else plan.why
        if why is not None:
            self.counters.modes_by_reason[why] += steps

    def _decide(self) -> StepPlan:
        plan = self._planner(self)
        block = plan.lanes.block if plan.lanes else None
        if not (plan.decode or plan.prefill or plan.preempt or block or self.in_flight or plan.reason is StepReason.IDLE):
            raise IntegrityError(f"{plan} does nothing, and would do so for ever")
        return plan

    def _begin(self, chunks: Iterable[Chunk]) -> Job:
        slices = [self._slice(chunk) for chunk in chunks]
        requests = [self.requests[piece.sequence.request_id] for piece in slices]
        whole = all(piece.start + piece.tokens == len(piece.sequence.tokens) for piece in slices)
        if not slices or not whole or any(map(self._job_of, requests)):
            raise IntegrityError(f"{chunks} is no new job: a request is not computed to its end, or is in another job")
        for older in self.jobs:
            older.overtaken += 1
        self._begun += 1
        job = Job(self._begun, slices, requests)
        self.jobs.append(job)
        return job

    def _find(self, job_id: int) -> Job:
        for job in self.jobs:
            if job.job_id == job_id:
                return job
        raise IntegrityError(f"there is no job {job_id}: {[job.job_id for job in self.jobs]} have begun and are not done")

    def _land(self) -> tuple[int, Job]:
        """The block in flight has ended. Its first layer, and its job."""
        job, self.in_flight = self.in_flight, None
        assert job is not None
        first_layer, job.layers_done = job.layers_done, job.end_layer
        job.flight = None
        return first_layer, job

    def _job_of(self, request: Request) -> Job | None:
        return next((job for job in self.jobs if request in job.requests), None)

    def _break_up(self, request: Request) -> None:
        """Drops the job of a request that is to be preempted; the job's other requests stay in PREFILL, with their pages."""
        job = self._job_of(request)
        if job is None:
            return
        if job.in_flight:
            raise IntegrityError(f"request {request.request_id} cannot be preempted: a block in flight writes into its pages")
        self._drop(job)

    def _drop(self, job: Job) -> None:
        self._dropped.append(job.job_id)
        self._remove(job)

    def _remove(self, job: Job) -> None:
        """The device writes no more for it."""
        self.jobs.remove(job)
        for request in job.gone:
            request.give_up_pages(self.pool)

    def _let_go(self, request: Request) -> None:
        job = self._job_of(request)
        if job is None:
            super()._let_go(request)
            return
        request.ttft_deadline_s = math.inf
        job.gone.append(request)
        if not job.wanted and not job.in_flight:
            self._drop(job)

    def _page_lists(self) -> Iterable[Sequence[int]]:
        yield from super()._page_lists()
        yield from (request.pages for job in self.jobs for request in job.gone)
