"""Offers load: in an open loop, where requests are sent on time whatever the server does, or in a closed one.

`run` takes uvloop where it is installed: a token costs it about half the CPU time of asyncio's own loop, so that tokens which
come all at once get their times sooner (`bench.client_capacity` measures both).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import aiohttp

from pdmux_ray.bench.load import client, client_health
from pdmux_ray.bench.load.client import Target
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.lifeline import Ending, Lifeline
from pdmux_ray.workload.requests import Ask, PlannedRequest

HEAD_START_S = 0.05  # from the end of the preparations to the run's start
PROGRESS_S = 0.25
SPIN_S = 0.001  # a loop's timers are as coarse as this, so the rest is waited for awake

Result = TypeVar("Result")
OnProgress = Callable[[int, int, int], None]  # (sent, done, planned)


@dataclass(frozen=True, slots=True)
class Options:
    """What bounds a run, and what it must keep to in order to count."""

    time_limit_s: float = 3600.0  # after which nothing more is sent
    drain_s: float = 60.0  # after the last send; requests that are not done by then are UNFINISHED
    lateness_tolerance_s: float | None = None  # of the p99; None: `client_health.lateness_tolerance_s`
    stall_tolerance_s: float = 0.010  # stalls of the client's loop that are longer count against the run


@dataclass(slots=True)
class Load:
    """What came of a run. Times of the lifelines are seconds on `time.perf_counter`."""

    lifelines: list[Lifeline]  # of the requests that were sent, in the order they were planned
    invalid: str | None  # why the run must not be used: the client fell behind. None: it may
    interrupted: bool
    counting: Literal["exact", "estimated"]  # how tokens of a chunk were counted
    loop: str  # the client's event loop: "uvloop" or "asyncio"
    start_s: float
    lateness_p99_s: float
    longest_stall_s: float  # of the client's loop
    stalled_share: float  # of the run
    notes: list[str] = field(default_factory=list)  # what a reader must know


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, on the best loop there is and ahead of other processes. Ctrl-C cancels the coroutine."""
    client_health.most_connections()
    with client_health.first_in_line(), asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(coroutine)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def open_loop(target: Target, plan: Sequence[PlannedRequest], options: Options, on_progress: OnProgress) -> Load:
    """Sends each request at its time; nothing that the server does can hold a send back.

    Being cancelled (Ctrl-C) ends it early: it returns what there is, `interrupted`. Raises PdmuxError when the server does not
    answer a first, plain request, ConfigError when its endpoint cannot take such prompts.
    """
    run = _Run(len(plan), options, on_progress)
    tolerance_s = options.lateness_tolerance_s
    if tolerance_s is None:
        tolerance_s = client_health.lateness_tolerance_s([planned.due_s for planned in plan])

    async def feed() -> None:
        for planned in sorted(plan, key=lambda planned: planned.due_s):
            if planned.due_s > options.time_limit_s:
                return
            data = client.body(run.target, planned.ask)  # before its time, so that it cannot make it late
            await _until(run.start_s + planned.due_s)
            run.begin(planned, data)

    return await run.load(target, feed, tolerance_s)


async def closed_loop(target: Target, asks: Sequence[Ask], concurrency: int, options: Options, on_progress: OnProgress) -> Load:
    """Keeps `concurrency` requests under way: the next is due when one has ended. Ends early and raises as `open_loop` does."""
    if concurrency < 1:
        raise ConfigError(f"A closed loop needs at least one request under way, not {concurrency}.")
    run = _Run(len(asks), options, on_progress)

    async def feed() -> None:
        room = asyncio.Semaphore(concurrency)
        for index, ask in enumerate(asks):
            data = client.body(run.target, ask)
            await room.acquire()
            due_s = time.perf_counter() - run.start_s
            if due_s > options.time_limit_s:
                return
            run.begin(PlannedRequest(index, due_s, ask), data).add_done_callback(lambda _: room.release())

    return await run.load(target, feed, client_health.MIN_LATENESS_S)


async def _until(due_s: float) -> None:
    """Awake for the last millisecond, while the loop serves its sockets; never early."""
    if (left_s := due_s - time.perf_counter()) > SPIN_S:
        await asyncio.sleep(left_s - SPIN_S)
    while time.perf_counter() < due_s:
        await asyncio.sleep(0)


class _Run:
    """One run: its requests under way, and the tasks beside them. Owner of the lifelines until `load` returns."""

    def __init__(self, planned: int, options: Options, on_progress: OnProgress) -> None:
        self._planned = planned
        self._options = options
        self._on_progress = on_progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._lifelines: list[tuple[int, Lifeline]] = []  # index in the plan
        self._inexact = 0
        self._done = 0
        self._failure: BaseException | None = None
        self._session: aiohttp.ClientSession  # from `load` on
        self.target: Target
        self.start_s = 0.0

    async def load(self, target: Target, feed: Callable[[], Awaitable[None]], tolerance_s: float) -> Load:
        interrupted = False
        async with client.session() as self._session:
            self.target = await client.probed(self._session, target)
            looked = client_health.LoopWatch(self._options.stall_tolerance_s)
            with client_health.no_collections():
                self.start_s = time.perf_counter() + HEAD_START_S
                try:
                    async with _beside(looked.run(), self._progress()):
                        await feed()
                        await self._drain()
                except asyncio.CancelledError:
                    interrupted = True
                    _forget_cancellation()
                await self._give_up()
        if self._failure:
            raise self._failure  # a defect of the client: servers' and connections' failures are in the lifelines
        self._on_progress(len(self._lifelines), self._done, self._planned)
        lifelines = [lifeline for _, lifeline in sorted(self._lifelines, key=lambda entry: entry[0])]
        late_s = client_health.lateness_p99_s(lifelines)
        unconnected = sum((lifeline.error or "").startswith(client.UNCONNECTED) for lifeline in lifelines)
        return Load(
            lifelines=lifelines,
            invalid=client_health.judged(late_s, tolerance_s, looked, unconnected),
            interrupted=interrupted,
            counting="exact" if self._exact else "estimated",
            loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
            start_s=self.start_s,
            lateness_p99_s=late_s,
            longest_stall_s=looked.longest_s,
            stalled_share=looked.stalled_share,
            notes=list(self._notes(lifelines)),
        )

    def begin(self, planned: PlannedRequest, data: bytes) -> asyncio.Task[None]:
        lifeline = client.new_lifeline(planned, self.start_s)
        self._lifelines.append((planned.index, lifeline))
        task = asyncio.create_task(self._send(lifeline, data))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._failure = error

    async def _send(self, lifeline: Lifeline, data: bytes) -> None:
        exact = await client.stream(self._session, self.target, data, lifeline)
        self._inexact += not exact
        self._done += 1

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._options.drain_s)

    async def _give_up(self) -> None:
        """Leaves what is still under way: UNFINISHED."""
        under_way = list(self._tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _progress(self) -> None:
        while True:
            self._on_progress(len(self._lifelines), self._done, self._planned)
            await asyncio.sleep(PROGRESS_S)

    @property
    def _exact(self) -> bool:
        return self.target.understood.usage_per_chunk and not self._inexact

    def _notes(self, lifelines: Sequence[Lifeline]) -> Iterator[str]:
        if not self._exact:
            yield "The server does not count tokens chunk by chunk: they are estimated from the lengths of the texts."
        if not self.target.understood.ignore_eos and any(lifeline.asked_tokens is not None for lifeline in lifelines):
            yield "The server does not know ignore_eos: answers may end before the tokens that were asked for."
        if (missing := self._planned - len(lifelines)) > 0:
            yield f"{missing} of {self._planned} planned requests were not sent: the run was ended early."
        odd = Counter(lifeline.error for lifeline in lifelines if lifeline.error and lifeline.ending is not Ending.ERROR)
        for text, count in odd.most_common(5):
            yield f"{count} requests: {text}"


@contextlib.asynccontextmanager
async def _beside(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs them in tasks of their own until the block ends."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _forget_cancellation() -> None:
    """The caller wants what there is, so the cancellation ends here."""
    if task := asyncio.current_task():
        task.uncancel()
