"""The step loop: receive → plan → launch → collect → publish, in a thread of its own or stepped by hand (simulator, tests).

A burst is launched at once: receive → plan → launch → collect → publish → receive → collect → publish → ...
This one is for a device that works on one batch at a time; `engine.lane_loop` has the one for a device with lanes.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from pdmux_ray.clock import Clock
from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import LayeredRunner, Runner, StepBatch, StepOutput
from pdmux_ray.engine.scheduler import Scheduler, failure
from pdmux_ray.errors import InstanceUnavailableError, PdmuxError
from pdmux_ray.policy.decisions import StepPlan, StepReason
from pdmux_ray.policy.look_ahead import NONE_ALIKE, Alike
from pdmux_ray.policy.views import Estimate
from pdmux_ray.types import TokenEvent

Publish = Callable[[str, list[TokenEvent]], None]

_DEADLINE_PERIOD_S = 0.25
_BOUNDS = 4.0  # a device that takes so many times the bound of its step may hang: other instances wait for it no longer

logger = logging.getLogger(__name__)


class StepLoop:
    """Drives one scheduler and one runner.

    `submit`, `abort`, `wake`, `stop`, `is_live`, `check_integrity` and the properties are for any thread, the rest for the
    loop's.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, publish: Publish, clock: Clock, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._runner = runner
        self._layered = runner if isinstance(runner, LayeredRunner) else None
        self._scheduler = scheduler
        self._publish = publish
        self._clock = clock
        self._inbox: dict[str, Request] = {}
        self._aborts: list[str] = []
        self._woken = False
        self._stopping = False
        self._mail = threading.Condition()  # guards the four above
        self._stepping = threading.RLock()  # held during a step
        self._next_deadline_check_s = 0.0
        self._latest = StepPlan(StepReason.IDLE)  # plan
        self._busy_since_s: float | None = None  # when the step under way began; None while idle
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """The breach that stopped the loop; None while it is sound."""
        return self._broken

    @property
    def waiting(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """To be computed here of those that wait or have begun. Not of who waits for a fetch."""
        if not (self._inbox or self._scheduler.waiting or self._scheduler.prefilling):
            return 0
        waiting: list[Request] = [*self.enqueued, *self._scheduler.waiting]
        to_begin = sum([len(request.tokens) - request.likely_hit_tokens for request in waiting if not request.peers])
        return to_begin + sum([len(request.tokens) - request.computed_tokens for request in self._scheduler.prefilling])

    @property
    def oldest_waiting_s(self) -> float:
        """How long the one that has waited longest has, since it came or lost its pages; 0 when nobody waits."""
        waiting: list[Request] = [*self.enqueued, *self._scheduler.waiting]
        return max([self._clock.now() - request.history[-1][0] for request in waiting], default=0.0)

    @property
    def rest_s(self) -> float | None:
        """How long it may sleep at most when a step had nothing to run. Who waits for a transfer makes it look for events and
        deadlines from time to time; None: it sleeps soundly until there is mail."""
        return _DEADLINE_PERIOD_S if self._scheduler.requests or self._scheduler.handoffs.alive else None

    @property
    def enqueued(self) -> list[Request]:
        """Who came since the last step."""
        return list(self._inbox.values())

    @property
    def step_age_s(self) -> float:
        """Seconds since the step under way began; 0 while there is none."""
        busy_since_s = self._busy_since_s
        return 0.0 if busy_since_s is None else max(self._clock.now() - busy_since_s, 0.0)

    def submit(self, make: Callable[[], Request]) -> None:
        """Enqueues what `make` returns; when it raises, nothing is enqueued.

        `make` runs under the mail lock: what it checks about the queue still holds when its request is enqueued.
        """
        with self._mail:
            request = make()
            self._inbox[request.request_id] = request
            self._mail.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._mail:
            self._aborts.extend(request_ids)
            self._mail.notify()

    def wake(self) -> None:
        """The KV port has events: a step takes them in, also when the loop was about to sleep."""
        with self._mail:
            self._woken = True
            self._mail.notify()

    def stop(self) -> None:
        """Asks `run` to return after the step under way."""
        with self._mail:
            self._stopping = True
            self._mail.notify()

    def is_live(self, request_id: str) -> bool:
        return request_id in self._inbox or request_id in self._scheduler.requests

    def run(self) -> None:
        """Steps until `stop`, sleeping while idle; then ends every request. A breach ends the loop and leaves `broken` set."""
        try:
            while not self._stopping:
                if not self.step():
                    rest_s = self.rest_s
                    if rest_s is None:
                        self.check_integrity()
                    with self._mail:
                        self._mail.wait_for(self._has_mail, rest_s)
        except Exception as error:
            logger.critical("the step loop stops: an invariant of the engine is broken", exc_info=True)
            self._broken = f"{type(error).__name__}: {error}"
        how = "failed" if self._broken else "was closed"
        self.end_all(InstanceUnavailableError(f"The instance that served this request {how}. Send it again."))

    def step(self) -> bool:
        """One step; False when there was nothing to run. A runner's error ends its batch; a breach raises IntegrityError."""
        with self._stepping:
            self._busy_since_s = now = self._clock.now()
            scheduler = self._scheduler
            self._receive(now)
            self._latest = plan = scheduler.plan(now)
            if plan.reason is StepReason.IDLE:
                self._busy_since_s = None
                scheduler.handoffs.busy(0.0)
                return False
            scheduler.handoffs.busy(self._longest_s(self._given(plan)))
            self._carry_out(plan, now)
            self._publish_events()
            return True

    def steps_alike(self) -> Alike:
        """How often the last step is certain to come again, unless something comes."""
        return NONE_ALIKE if self._has_mail() else self._scheduler.steps_alike(self._latest)

    def repeat(self, begin_s: float, ends_s: Sequence[float], token: int) -> None:
        """As many of those steps as there are ends, at least one, each from the end of the one before. The engine is then as if
        it had taken them one by one, with the same token for everyone, but for the news, of which there are none."""
        with self._stepping:
            plan, begins_s, first = self._latest, (begin_s, *ends_s[:-1]), 0
            self._scheduler.timeline.steps(plan, begin_s, ends_s, self._estimates(plan, begin_s, ends_s), 0)
            self._scheduler.repeat(plan, len(ends_s), token, begins_s[-1], ends_s[-1])
            self._busy_since_s = begins_s[-1]
            while (first := bisect_left(begins_s, self._next_deadline_check_s, first)) < len(begins_s):
                self._next_deadline_check_s = begins_s[first] + _DEADLINE_PERIOD_S  # nobody was due: see `Alike.before_s`

    def expect(self, seconds: float) -> None:
        """For so long nobody will ask the port for its events."""
        self._scheduler.handoffs.busy(seconds)

    def _estimates(self, plan: StepPlan, begin_s: float, ends_s: Sequence[float]) -> Sequence[Estimate | None]:
        """Of each of several steps of one plan, that end then."""
        return [plan.step_s] * len(ends_s)

    def _given(self, plan: StepPlan) -> list[Estimate]:
        """Of what the device computes in a step; empty without a latency model."""
        return plan.estimates

    def _longest_s(self, given: list[Estimate]) -> float:
        """How long such a step may take before it counts as hung: what is predicted says so, else what is configured."""
        bound_s = sum([estimate.bound_s for estimate in given])
        return min(_BOUNDS * bound_s, self._stall_timeout_s) if given else self._stall_timeout_s

    def _has_mail(self) -> bool:
        return bool(self._inbox or self._aborts or self._woken or self._stopping)

    def _carry_out(self, plan: StepPlan, now: float) -> None:
        batch = self._scheduler.apply(plan, now)
        self._compute(plan, batch, partial(self._runner.launch, batch, partial(self._give_up, batch)))

    def _compute(self, plan: StepPlan, batch: StepBatch, launch: Callable[[], None]) -> list[float]:
        """Launches a batch, waits for each of its steps and takes in the tokens.

        The seconds of each step; not of one that was given up or has failed.
        """
        took_s: list[float] = []
        began_s = self._clock.now()
        for left, output in self._outputs(batch, launch):
            ended_s = self._clock.now()
            self._scheduler.timeline.step(plan, began_s, ended_s, len(self._scheduler.waiting))
            if output is not None:
                self._scheduler.commit(batch, output, ended_s)
                took_s.append(ended_s - began_s)
            began_s = ended_s
            if left:
                self._amid_burst(plan)
        return took_s

    def _outputs(self, batch: StepBatch, launch: Callable[[], None]) -> Iterator[tuple[int, StepOutput | None]]:
        """How many steps are left after this one, and what it answered. An error of the device ends the batch's requests."""
        try:
            launch()
            for left in reversed(range(batch.steps)):
                output = self._runner.collect()
                self._scheduler.computing(left)
                yield left, output
        except Exception as error:
            self._scheduler.computing(0)
            self._fail_batch(batch, error)

    def _amid_burst(self, plan: StepPlan) -> None:
        """What happens between any two steps, but that nothing is planned. Publishes the tokens, too."""
        self._busy_since_s = now = self._clock.now()
        self._receive(now)
        self._scheduler.handoffs.busy(self._longest_s(self._given(plan)))

    def check_integrity(self) -> None:
        with self._stepping:
            self._scheduler.check_integrity()

    def end_all(self, error: PdmuxError) -> None:
        """Ends every request with this error, also after a breach, when the scheduler's state cannot be trusted."""
        scheduler = self._scheduler
        with self._stepping, self._mail:
            self._stopping = True
            self._busy_since_s = None
            for request in self._inbox.values():
                scheduler.add(request)
            self._inbox = {}
            try:
                scheduler.fail(scheduler.requests.values(), error, self._clock.now())
            except Exception:
                logger.critical("requests could not be ended in order", exc_info=True)
            events = scheduler.take_events()
            for request in scheduler.requests.values():  # whom `fail` did not reach
                if not request.exported:
                    events.setdefault(request.sink, []).append(failure(request.request_id, error))
            scheduler.requests.clear()
            for sink, news in events.items():
                self._publish_to(sink, news)

    def _receive(self, now: float) -> None:
        """Takes in what came since the last step: new requests, aborts, news of transfers; then deadlines that have passed."""
        scheduler = self._scheduler
        self._woken = False  # before it listens: what comes later wakes it again
        scheduler.handoffs.listen()
        if self._inbox or self._aborts:
            with self._mail:
                for request in self._inbox.values():
                    scheduler.add(request)
                aborts, self._aborts = self._aborts, []
                self._inbox = {}
            for request_id in aborts:
                scheduler.abort(request_id, now)
        scheduler.handoffs.act(scheduler, now)
        if now >= self._next_deadline_check_s:
            self._next_deadline_check_s = now + _DEADLINE_PERIOD_S
            scheduler.expire(now)
        self._publish_events()

    def _give_up(self, batch: StepBatch) -> bool:
        """Between two blocks of a step's layers: aborts that came meanwhile do not wait for the end of a long prefill, nor does
        whoever decodes elsewhere for KV that is there.

        Requests that are not in the step end at once. The step is given up when everyone it prefills is gone; its decodes,
        if any, run again in the next one. Those in a step that goes on are aborted after it.
        """
        handoffs = self._scheduler.handoffs
        handoffs.listen()
        if self._layered is not None:
            handoffs.amid_pass(batch.prefills, self._layered.layers_done, self._scheduler.page_size)
        unwanted = handoffs.unwanted()
        if not self._aborts and not unwanted:
            return False
        prefilled = {piece.sequence.request_id for piece in batch.prefills}
        running = prefilled.union(sequence.request_id for sequence in batch.decodes)
        with self._mail:
            now: list[str] = []
            later: list[str] = []
            for request_id in self._aborts:
                (later if request_id in running or request_id in self._inbox else now).append(request_id)
            self._aborts = later
        for request_id in now:
            self._scheduler.abort(request_id, self._clock.now())
        if now:
            self._publish_events()
        return prefilled.issubset({*later, *unwanted})

    def _fail_batch(self, batch: StepBatch, error: Exception) -> None:
        sequences = [*batch.decodes, *(piece.sequence for piece in batch.prefills)]
        live = self._scheduler.requests
        requests = [r for r in sequences if isinstance(r, Request) and live.get(r.request_id) is r]  # some ended amid the burst
        self._scheduler.fail(requests, device_failure(error), self._clock.now())

    def _publish_events(self) -> None:
        if not self._scheduler.has_events:
            return
        for sink, events in self._scheduler.take_events().items():
            if not self._publish_to(sink, events):
                # Their pages must not be held for someone who cannot be told, but the step under way may still write there.
                self.abort([r.request_id for r in self._scheduler.requests.values() if r.sink == sink])

    def _publish_to(self, sink: str, events: list[TokenEvent]) -> bool:
        try:
            self._publish(sink, events)
        except Exception:
            logger.exception("sink %r did not take its events; its requests are aborted", sink)
            return False
        return True


def device_failure(error: Exception) -> PdmuxError:
    """What the clients are told of it; the log has the rest."""
    logger.error("a step failed on the device; its requests end, the engine goes on", exc_info=error)
    return PdmuxError("The device failed while it computed this request. Try again.")
