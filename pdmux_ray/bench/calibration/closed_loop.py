"""What a closed loop of alike requests measures: so many at once, and the next one when one ends. Pure.

It is how benchmarks of servers are run whose results are published, and it is simpler than a fleet: no arrivals, no policies,
no cache. So thousands of such points take a minute.

An engine runs passes one after the other. A pass computes up to `budget` prompt tokens, first come, first served, in pieces;
with `mixes` every decode gets a token in it, else they wait. Without prompts it is a decode step. A request is admitted when
the pool has room for its prompt and a part of its answer, and when the engine looks for new ones: after every pass, and every
so many decode steps. Nobody is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Protocol


class StepTimes(Protocol):
    """Of one engine. Seconds; lengths in tokens."""

    def decode_s(self, batch: int, context: int) -> float:
        """A decode step of requests with so much context each."""
        ...

    def pass_s(self, new: int, prompt: int, batch: int, context: int) -> float:
        """A pass over `new` tokens of prompts of length `prompt`, with `batch` decodes (0: none)."""
        ...


@dataclass(frozen=True, slots=True)
class Loop:
    """`shortest`: lengths are uniform from so much of `prompt` and `output` up to those."""

    prompt: int
    output: int
    concurrency: int
    requests: int
    budget: int
    mixes: bool
    pool: float  # tokens of KV that fit
    reserved: float  # of a request's answer, when it is admitted
    shortest: float = 1.0
    look_every: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Request:
    came_s: float
    prompt: int
    output: int
    left: int  # prompt tokens to compute
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of every request, in order of ending. Seconds; `tpot_s` of those with more than one token."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]


@dataclass(slots=True)
class _Engine:
    times: StepTimes
    loop: Loop
    now: float = 0.0
    steps: int = 0  # in which the decodes had a token each
    look_at: int = 0  # the step at which it looks for new requests
    held: int = 0  # tokens of KV that are promised
    context: int = 0  # of the decodes, all together, counted as their lengths halfway
    waiting: deque[_Request] = field(default_factory=deque)
    prefilling: deque[_Request] = field(default_factory=deque)
    decoding: list[tuple[int, int, _Request]] = field(default_factory=list)  # a heap: (ends at step, tie, request)
    ended: list[_Request] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        self._admit()
        if self.prefilling:
            self._pass()
        else:
            batch, many = len(self.decoding), self.decoding[0][0] - self.steps
            if self.waiting and self.look_at > self.steps:
                many = min(many, self.look_at - self.steps)
            self.now += many * self.times.decode_s(batch, self.context // batch)
            self.steps += many
        self._collect()

    def _admit(self) -> None:
        if self.steps < self.look_at and self.decoding:
            return
        self.look_at = self.steps + self.loop.look_every
        while self.waiting:
            size = self._size(self.waiting[0])
            if self.held and self.held + size > self.loop.pool:
                return
            self.held += size
            self.prefilling.append(self.waiting.popleft())

    def _size(self, request: _Request) -> int:
        return request.prompt + round(request.output * self.loop.reserved)

    def _pass(self) -> None:
        left, done = self.loop.budget, []
        while self.prefilling and left:
            request = self.prefilling[0]
            piece = min(left, request.left)
            request.left -= piece
            left -= piece
            if not request.left:
                done.append(self.prefilling.popleft())
        batch = len(self.decoding) if self.loop.mixes else 0
        mean = self.context // batch if batch else 0
        self.now += self.times.pass_s(self.loop.budget - left, self.loop.prompt, batch, mean)
        self.steps += bool(batch)
        self.look_at = self.steps
        for request in done:
            self.start_decoding(request)

    def start_decoding(self, request: _Request) -> None:
        """It has its first token."""
        request.first_s = self.now
        self.ttft_s.append(self.now - request.came_s)
        self.context += request.prompt + request.output // 2
        heappush(self.decoding, (self.steps + request.output - 1, len(self.ttft_s), request))

    def _collect(self) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            request = heappop(self.decoding)[2]
            self.context -= request.prompt + request.output // 2
            self.held -= self._size(request)
            if request.output > 1:
                self.tpot_s.append((self.now - request.first_s) / (request.output - 1))
            self.ended.append(request)


def together(times: StepTimes, loop: Loop) -> Latencies:
    """One engine that prefills and decodes."""
    engine, draw, sent = _Engine(times, loop), Random(loop.seed), 0
    for _ in range(min(loop.concurrency, loop.requests)):
        engine.waiting.append(_drawn(loop, draw, 0.0))
        sent += 1
    while engine.waiting or engine.prefilling or engine.decoding:
        engine.step()
        for _ in engine.ended[: loop.requests - sent]:
            engine.waiting.append(_drawn(loop, draw, engine.now))
            sent += 1
        engine.ended.clear()
    return Latencies(engine.ttft_s, engine.tpot_s)


def _drawn(loop: Loop, draw: Random, now: float) -> _Request:
    prompt, output = (max(1, draw.randint(round(most * loop.shortest), most)) for most in (loop.prompt, loop.output))
    return _Request(now, prompt, output, prompt)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines that prefill, each one prompt after the other, and engines that decode."""

    prefills: int
    decodes: int
    transfer_s: float = 0.0


def apart(prefill: StepTimes, decode: StepTimes, loop: Loop, fleet: Fleet) -> Latencies:
    """Prompts go to the prefill engine that is free first; decodes are shared out evenly, and all engines that decode are taken
    to step alike. The first token comes with the transfer."""
    engine, draw, sent = _Engine(decode, loop), Random(loop.seed), 0
    free_s = [0.0] * fleet.prefills  # a heap: when each is
    coming: list[tuple[float, int, _Request]] = []  # a heap: prompts that are done then

    def send(now: float) -> None:
        nonlocal sent
        request = _drawn(loop, draw, now)
        done_s = max(heappop(free_s), now) + prefill.pass_s(request.prompt, request.prompt, 0, 0)
        heappush(free_s, done_s)
        heappush(coming, (done_s + fleet.transfer_s, sent, request))
        sent += 1

    for _ in range(min(loop.concurrency, loop.requests)):
        send(0.0)
    while coming or engine.decoding:
        if not engine.decoding:
            engine.now = max(engine.now, coming[0][0])
        else:
            _decode(engine, fleet.decodes, coming[0][0] if coming else None)
        while coming and coming[0][0] <= engine.now:
            engine.start_decoding(heappop(coming)[2])
        engine._collect()
        for _ in engine.ended[: loop.requests - sent]:
            send(engine.now)
        engine.ended.clear()
    return Latencies(engine.ttft_s, engine.tpot_s)


def _decode(engine: _Engine, engines: int, until_s: float | None) -> None:
    """Steps until one ends, or until then."""
    batch, many = len(engine.decoding), engine.decoding[0][0] - engine.steps
    step_s = engine.times.decode_s(-(-batch // engines), engine.context // batch)
    if until_s is not None:
        many = min(many, max(int((until_s - engine.now) / step_s) + 1, 1))
    engine.now += many * step_s
    engine.steps += many
