"""The engine of one instance, as the rest of the project uses it. Torch-free, Ray-free.

engine = Engine(runner, limits, publish)      publish(sink, events) is called in the engine's thread
engine.start()                                or engine.step() by hand, as the simulator does
engine.submit(NewRequest(...)); engine.abort([...]); engine.load(); engine.close()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kv_transfer.api import KvPort, Wanted
from pdmux_ray.clock import Clock, WallClock
from pdmux_ray.engine.admission import Admitter
from pdmux_ray.engine.counters import Counters
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.handoffs import Handoffs, NoPort, export_id
from pdmux_ray.engine.lane_loop import LaneLoop
from pdmux_ray.engine.lanes import LaneScheduler, Planner
from pdmux_ray.engine.limits import EngineLimits, with_lanes
from pdmux_ray.engine.loop import Publish, StepLoop
from pdmux_ray.engine.pages import PagePool
from pdmux_ray.engine.planner import lane_limits, make_admitter, make_planner
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import LaneRunner, Runner
from pdmux_ray.engine.scheduler import Scheduler
from pdmux_ray.engine.timeline import KEPT, Timeline
from pdmux_ray.errors import (
    ConfigError,
    ContextLengthError,
    InstanceUnavailableError,
    PdmuxError,
    QueueFullError,
    RequestError,
)
from pdmux_ray.policy.look_ahead import Alike
from pdmux_ray.policy.routing import stalled
from pdmux_ray.policy.views import CostModel, RequestView
from pdmux_ray.types import Load, NewRequest, SamplingParams

logger = logging.getLogger(__name__)


class Engine:
    """Owns the runner, the KV pages and the step loop. Every method but `step` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        publish: Publish,
        clock: Clock | None = None,
        *,
        costs: CostModel | None = None,
        planner: Planner | None = None,
        port: KvPort | None = None,
        records: int = KEPT,
    ) -> None:
        """`costs`: of this model on this device, for the modes that predict. `planner`: instead of the policy that the limits
        name, for a mode with lanes. `port`: to other instances; its owner closes it before this engine, whose memory it
        reads and writes. `records`: that its timeline keeps.
        """
        pool_tokens = runner.pages * runner.page_size
        if pool_tokens < limits.context_length:
            logger.warning("the KV pool holds %d tokens: the context of %d is cut to that", pool_tokens, limits.context_length)
            limits = replace(limits, context_length=pool_tokens)
        self.limits = limits
        self._runner = runner
        self._clock = clock or WallClock()
        self._pool = PagePool(runner.pages, runner.page_size)
        self._admitter: Admitter | None = None
        self._has_port = port is not None
        self._handoffs = Handoffs(port or NoPort(), _layers(runner, port), self._take_export)
        self._scheduler, self._loop = self._make_loop(publish, costs, planner, records)
        if port is not None:
            port.wake_with(self._loop.wake)
        self._arrivals = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def _make_loop(
        self, publish: Publish, costs: CostModel | None, planner: Planner | None, records: int
    ) -> tuple[Scheduler, StepLoop]:
        limits, runner = self.limits, self._runner
        if not limits.has_lanes:
            units = runner.units if isinstance(runner, LaneRunner) else 1
            scheduler = Scheduler(limits, self._pool, Timeline(units, limits.mode, records), self._handoffs)
            return scheduler, StepLoop(runner, scheduler, publish, self._clock, limits.stall_timeout_s)
        device = with_lanes(runner, limits.mode)
        if costs is None and isinstance(device, FakeRunner):
            costs = device.costs  # it takes what they say
        bounds = lane_limits(limits, device)
        timeline = Timeline(device.units, limits.mode, records)
        planner = planner or make_planner(bounds, costs)
        lanes = LaneScheduler(limits, self._pool, timeline, self._handoffs, device, planner)
        self._admitter = make_admitter(lanes, limits, bounds, costs)
        return lanes, LaneLoop(device, lanes, publish, self._clock, limits.stall_timeout_s, costs, self._admitter)

    def start(self) -> None:
        """Starts the step loop's thread. Once."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._loop.run, name="engine-step-loop", daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Runs one step in this thread, for an engine that was not started. False when there was nothing to run."""
        return self._loop.step()

    @property
    def rest_s(self) -> float | None:
        """When `step` had nothing to run: seconds until it is due again, unless something comes before; None: not before."""
        return self._loop.rest_s

    def steps_alike(self) -> Alike:
        """For a simulator, between two steps: how often the last one is certain to come again, unless something comes."""
        return self._loop.steps_alike()

    @property
    def decoding(self) -> Sequence[RequestView]:
        """Likewise: who decodes."""
        return self._scheduler.decoding

    def expect(self, seconds: float) -> None:
        """Steps that are alike will take so long, until somebody calls `repeat` or `step`."""
        self._loop.expect(seconds)

    def repeat(self, begin_s: float, ends_s: Sequence[float], token: int) -> None:
        """Takes in so many of those steps at once, as if `step` had run each; but nobody is told of the tokens."""
        self._loop.repeat(begin_s, ends_s, token)

    def submit(self, new: NewRequest) -> None:
        """Accepts a request, or raises at once and keeps nothing of it.

        ContextLengthError, RequestError: the request is wrong. QueueFullError: try again later. InstanceUnavailableError: the
        engine is closed or broken. `max_tokens` beyond the context ends the request there, with finish reason LENGTH.
        """
        self._check(new)
        now = self._clock.now()
        request = Request(
            new,
            context_length=self.limits.context_length,
            eos_token_ids=self.limits.eos_token_ids,
            page_size=self._pool.page_size,
            prefix_cache=self.limits.prefix_cache,
            now=now,
            ttft_s=self.limits.ttft_objective.of(len(new.prompt) + len(new.generated or ())),
        )
        self._loop.submit(lambda: self._admit(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests and frees their pages before the next step; unknown ids are ignored.

        The last event of an aborted request has finish ABORT.
        """
        self._loop.abort(list(request_ids))

    def load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=len(scheduler.decoding) + len(scheduler.prefilling) + len(scheduler.transferring),
            waiting=self._loop.waiting,
            free_pages=self._pool.available,
            total_pages=self._pool.pages,
            steps=scheduler.counters.steps,
            step_age_s=self._loop.step_age_s,
            leased_pages=self._pool.leased,
            quarantined_pages=self._pool.quarantined,
            decoding=len(scheduler.decoding),
            decode_context_tokens=sum([len(request.tokens) for request in scheduler.decoding]),
            queued_prefill_tokens=self._loop.queued_prefill_tokens,
        )

    def defect(self) -> str | None:
        """Why the engine will never take a step again; None while it may."""
        if self._loop.broken:
            return f"the engine is broken: {self._loop.broken}"
        return "the engine is closed" if self._closed else None

    def problem(self) -> str | None:
        """Why the engine is unhealthy: it takes no requests, or has no part in transfers any more. None while it is healthy."""
        trouble = self._trouble()
        if trouble is None and self._handoffs.broken is not None:
            return f"the KV port has failed: {self._handoffs.broken}"
        return trouble

    def _trouble(self) -> str | None:
        """Why it takes no requests: a defect, or a stall, which may pass."""
        defect = self.defect()
        if defect is not None:
            return defect
        age_s = self._loop.step_age_s
        if stalled(age_s, self.limits.stall_timeout_s):
            return f"the step under way has taken {age_s:.1f} s, more than {self.limits.stall_timeout_s:.1f} s"
        return None

    @property
    def timeline(self) -> Timeline:
        """What the step loop did lately; `since` may be called from any thread."""
        return self._scheduler.timeline

    @property
    def counters(self) -> Counters:
        """Running totals, to be read only."""
        return self._scheduler.counters

    def figures(self) -> dict[str, float | Mapping[str, float]]:
        """Running totals, and how it is now, by the names of `metrics.catalog`; as JSON has them."""
        guard = self.timeline.guard_factor()
        lanes = self._scheduler.lane_units if isinstance(self._scheduler, LaneScheduler) else None
        found: dict[str, float | Mapping[str, float] | None] = {
            **self.counters.figures(),
            "pdmux_pages": self._pool.by_owner(),
            "pdmux_oldest_waiting_seconds": self._loop.oldest_waiting_s,
            "pdmux_lane_units": lanes,
            "pdmux_guard_factor": guard,
        }
        return {name: value for name, value in found.items() if value is not None}

    def check_integrity(self) -> None:
        """Checks every page and queue between two steps. Raises IntegrityError."""
        self._loop.check_integrity()

    def close(self) -> None:
        """Ends every request with an ERROR event, joins the thread and closes the runner. Safe to call twice.

        Raises PdmuxError when the step under way does not end within the stall timeout; the runner is then left open.
        """
        self._closed = True
        self._loop.stop()
        if self._thread is None:
            self._loop.end_all(InstanceUnavailableError("The instance that served this request was closed. Send it again."))
        else:
            self._thread.join(self.limits.stall_timeout_s)
            if self._thread.is_alive():
                raise PdmuxError(
                    f"The step under way did not end within {self.limits.stall_timeout_s} s; the runner is left open. "
                    "End the process."
                )
        self._runner.close()

    def _take_export(self, wanted: Wanted) -> None:
        """Enqueues a prefill for another instance, in the step loop's thread. Raises as `submit` does.

        It is due as if it were served here, whose objectives are the other one's: a short prompt must not wait for a long one.
        """
        new = NewRequest(export_id(wanted.handoff), wanted.tokens, SamplingParams(max_tokens=1), deadline_s=wanted.deadline)
        self._check(new)
        now = self._clock.now()
        request = Request(
            new,
            context_length=self.limits.context_length,
            eos_token_ids=self.limits.eos_token_ids,
            page_size=self._pool.page_size,
            prefix_cache=self.limits.prefix_cache,
            now=now,
            ttft_s=min(self.limits.ttft_objective.of(len(new.prompt)), wanted.deadline - now),
            export=wanted.handoff,
        )
        self._loop.submit(lambda: self._admit(request))

    def _admit(self, request: Request) -> Request:
        trouble = self._trouble()
        if trouble is not None:
            raise InstanceUnavailableError(f"This instance takes no requests: {trouble}.")
        if self._loop.is_live(request.request_id):
            raise RequestError(f"Request id {request.request_id!r} is in use. Choose another one.", param="request_id")
        if not request.resumed:
            waiting = self._loop.waiting
            if waiting >= self.limits.max_waiting:
                raise QueueFullError(waiting, self.counters.retry_after_s(waiting))
            if self._admitter is not None and not request.exported and not request.peers:
                self._admitter.check(request, self._loop.enqueued, self._clock.now())
        self._arrivals += 1
        request.arrival = self._arrivals
        return request

    def _check(self, new: NewRequest) -> None:
        prompt, generated, vocab_size = new.prompt, new.generated or (), self.limits.vocab_size
        if new.prefill_peers and not self._has_port:
            raise RequestError("This instance is not linked to others, so it cannot fetch KV from any. Name no prefill peers.")
        if new.prefill_peers and new.fetch_deadline_s is None:
            raise RequestError("A request with prefill peers needs a deadline for the fetch. Set fetch_deadline_s.")
        if not prompt:
            raise RequestError("The prompt is empty. Give at least one token.", param="prompt")
        if len(prompt) + len(generated) >= self.limits.context_length:
            raise ContextLengthError(len(prompt) + len(generated), self.limits.context_length)
        if len(generated) >= new.params.max_tokens:
            raise RequestError(f"{len(generated)} tokens of {new.params.max_tokens} are there already: nothing is left to do.")
        for param, ids in (("prompt", prompt), ("generated", generated), ("stop_token_ids", new.params.stop_token_ids)):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                wrong = next(token for token in ids if not 0 <= token < vocab_size)
                raise RequestError(
                    f"Token id {wrong} is outside the vocabulary: 0 to {vocab_size - 1} are allowed.", param=param
                )


def _layers(runner: Runner, port: KvPort | None) -> int:
    """Of the model, for what is told to the port. Raises ConfigError when the device does not say."""
    if isinstance(runner, LaneRunner):
        return runner.layers
    if port is not None:
        raise ConfigError("KV is handed over by layers, and this device does not say how many there are. Use one with lanes.")
    return 1
