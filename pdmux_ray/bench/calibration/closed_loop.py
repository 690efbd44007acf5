"""What a closed loop of alike requests measures: so many at once, and the next one when one ends. Pure.

It is how benchmarks of servers are run whose results are published, and it is simpler than a fleet: no arrivals, no policies,
no cache. So thousands of such points take a minute.

An engine runs passes one after the other. A pass computes up to `budget` prompt tokens, first come, first served, in pieces;
with `mixes` every decode gets a token in it, else they wait. Without prompts it is a decode step. A request is admitted when
the pool has room for its prompt and a part of its answer, and when the engine looks for new ones: after every pass, and every
so many decode steps. Nobody is preempted.

Where engines that prefill are apart from those that decode (`apart`), each of the former computes up to `budget` tokens of
prompts that wait. A prompt's KV is sent when those that decode have room for the request, first come, first served; its first
token is there when all of its KV is.
"""

from __future__ import annotations

import math
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
    """`shortest`, `longest`: lengths are uniform from so many times `prompt` and `output` up to so many times."""

    prompt: int
    output: int
    concurrency: int
    requests: int
    budget: int
    mixes: bool
    pool: float  # tokens of KV that fit
    reserved: float  # of a request's answer, when it is admitted
    shortest: float = 1.0
    longest: float = 1.0
    slots: int = 2**31  # requests that an engine has at once
    look_every: int = 1
    accept_s: float = 0.0  # of the server's front, which hands requests to the engine one after the other
    seed: int = 0


@dataclass(slots=True)
class _Request:
    number: int  # in order of coming
    came_s: float
    ready_s: float  # when the engine can see it
    prompt: int
    output: int
    left: int  # prompt tokens to compute
    computed_s: float = 0.0  # when its prompt was, apart
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of every request, in order of ending. Seconds; `tpot_s` of those with more than one token."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]


class _Clients:
    """They, and the front that takes their requests."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._draw = Random(loop.seed)
        self._free_s = 0.0  # when the front is
        self.sent = 0

    def send(self, many: int, now: float) -> list[_Request]:
        """As many, but no more than there are."""
        return [self._request(now) for _ in range(min(many, self._loop.requests - self.sent))]

    def _request(self, now: float) -> _Request:
        loop = self._loop
        prompt, output = self._length(loop.prompt), self._length(loop.output)
        self._free_s = max(self._free_s, now) + loop.accept_s
        self.sent += 1
        return _Request(self.sent, now, self._free_s, prompt, output, prompt)

    def _length(self, told: int) -> int:
        return max(1, self._draw.randint(round(told * self._loop.shortest), round(told * self._loop.longest)))


@dataclass(slots=True)
class _Engine:
    times: StepTimes
    loop: Loop
    now: float = 0.0
    steps: int = 0  # in which the decodes had a token each
    look_at: int = 0  # the step at which it looks for new requests
    held: int = 0  # tokens of KV that are promised
    full: bool = False  # for whoever waits first
    context: int = 0  # of the decodes, all together, counted as their lengths halfway
    waiting: deque[_Request] = field(default_factory=deque)
    prefilling: deque[_Request] = field(default_factory=deque)
    decoding: list[tuple[int, int, _Request]] = field(default_factory=list)  # a heap: (ends at step, tie, request)
    ended: list[_Request] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        if not self.prefilling and not self.decoding:
            self.now = max(self.now, self.waiting[0].ready_s)
        self._admit()
        if self.prefilling:
            self._pass()
        else:
            self._decode()
        self.collect()

    def _decode(self) -> None:
        """Steps, until something may be otherwise."""
        batch, many = len(self.decoding), self.decoding[0][0] - self.steps
        step_s = self.times.decode_s(batch, self.context // batch)
        if self.waiting and not self.full:
            ready = math.ceil((self.waiting[0].ready_s - self.now) / step_s)
            many = min(many, max(ready, self.look_at - self.steps, 1))
        self.now += many * step_s
        self.steps += many

    def _admit(self) -> None:
        past, every = self.steps - self.look_at, self.loop.look_every
        if self.decoding and (past < 0 or past % every):
            self.look_at += max(-(-past // every), 0) * every
            return
        self.look_at = self.steps + every
        while self.waiting and self.waiting[0].ready_s <= self.now:
            size = self.size(self.waiting[0])
            full = self.held + size > self.loop.pool or len(self.decoding) + len(self.prefilling) >= self.loop.slots
            self.full = bool(self.held) and full
            if self.full:
                return
            self.held += size
            self.prefilling.append(self.waiting.popleft())

    def size(self, request: _Request) -> int:
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

    def collect(self) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            request = heappop(self.decoding)[2]
            self.context -= request.prompt + request.output // 2
            self.held -= self.size(request)
            self.full = False
            if request.output > 1:
                self.tpot_s.append((self.now - request.first_s) / (request.output - 1))
            self.ended.append(request)


def together(times: StepTimes, loop: Loop) -> Latencies:
    """One engine that prefills and decodes."""
    engine, clients = _Engine(times, loop), _Clients(loop)
    engine.waiting.extend(clients.send(loop.concurrency, 0.0))
    while engine.waiting or engine.prefilling or engine.decoding:
        engine.step()
        engine.waiting.extend(clients.send(len(engine.ended), engine.now))
        engine.ended.clear()
    return Latencies(engine.ttft_s, engine.tpot_s)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines that prefill, and engines that decode. `send_s`: a token's KV from one to another."""

    prefills: int
    decodes: int
    send_s: float = 0.0


def apart(prefill: StepTimes, decode: StepTimes, loop: Loop, fleet: Fleet) -> Latencies:
    """Prompts go to the prefill engine that is free first; decodes are shared out evenly, and all engines that decode are taken
    to step alike. `loop.pool` is of all of these together."""
    run = _Apart(prefill, fleet, loop, _Engine(decode, loop), _Clients(loop), [0.0] * fleet.prefills)
    run.prompts.extend(run.clients.send(loop.concurrency, 0.0))
    while run.clients.sent > len(run.engine.ended):
        run.step()
    return Latencies(run.engine.ttft_s, run.engine.tpot_s)


@dataclass(slots=True)
class _Apart:
    prefill: StepTimes
    fleet: Fleet
    loop: Loop
    engine: _Engine  # all that decode; `waiting` are prompts that are computed, and for whom it has no room yet
    clients: _Clients
    free_s: list[float]  # a heap: when each that prefills is
    room_s: float = 0.0  # since when there has been room for whoever waits first
    prompts: deque[_Request] = field(default_factory=deque)  # that nobody computes yet
    computing: list[tuple[float, int, _Request]] = field(default_factory=list)  # a heap: (ends at, tie, request)
    coming: list[tuple[float, int, _Request]] = field(default_factory=list)  # a heap: (its KV is there at, tie, request)

    def step(self) -> None:
        """Up to the next thing that happens: a request ends, or comes to where it goes next."""
        engine, before = self.engine, len(self.engine.ended)
        self._prefill()
        self._admit()
        while self.coming and self.coming[0][0] <= engine.now:
            engine.start_decoding(heappop(self.coming)[2])
        at_s = min((heap[0][0] for heap in (self.computing, self.coming) if heap), default=None)
        if self.prompts:
            free_s = max(self.free_s[0], self.prompts[0].ready_s)
            at_s = free_s if at_s is None else min(at_s, free_s)
        if engine.decoding:
            _decode(engine, self.fleet.decodes, at_s)
        elif at_s is not None:
            engine.now = max(engine.now, at_s)
        engine.collect()
        self.prompts.extend(self.clients.send(len(engine.ended) - before, engine.now))

    def _prefill(self) -> None:
        """Those that are free by now share out what waits."""
        while self.prompts and max(self.free_s[0], self.prompts[0].ready_s) <= self.engine.now:
            most = -(-len(self.prompts) // sum(at_s <= self.engine.now for at_s in self.free_s))
            begin_s = max(heappop(self.free_s), self.prompts[0].ready_s)
            batch = self._batch(most, begin_s)
            tokens = sum(request.prompt for request in batch)
            end_s = begin_s + self.prefill.pass_s(tokens, batch[0].prompt, 0, 0)
            heappush(self.free_s, end_s)
            for request in batch:
                request.computed_s = end_s
                heappush(self.computing, (end_s, request.number, request))

    def _batch(self, most: int, by_s: float) -> list[_Request]:
        """The first one whatever its length, and up to the budget others that are there by then."""
        batch, left = [self.prompts.popleft()], self.loop.budget
        left -= batch[0].prompt
        while self.prompts and len(batch) < most and self.prompts[0].ready_s <= by_s and self.prompts[0].prompt <= left:
            batch.append(self.prompts.popleft())
            left -= batch[-1].prompt
        return batch

    def _admit(self) -> None:
        engine = self.engine
        while self.computing and self.computing[0][0] <= engine.now:
            engine.waiting.append(heappop(self.computing)[2])
        while engine.waiting:
            request = engine.waiting[0]
            size = engine.size(request)
            if engine.held and engine.held + size > self.loop.pool:
                self.room_s = math.inf
                return
            if self.room_s == math.inf:
                self.room_s = engine.now
            engine.held += size
            there_s = max(request.computed_s, self.room_s) + self.fleet.send_s * request.prompt
            heappush(self.coming, (there_s, request.number, request))
            engine.waiting.popleft()


def _decode(engine: _Engine, engines: int, until_s: float | None) -> None:
    """Steps until one ends, or until then."""
    batch, many = len(engine.decoding), engine.decoding[0][0] - engine.steps
    step_s = engine.times.decode_s(-(-batch // engines), engine.context // batch)
    if until_s is not None:
        many = min(many, max(int((until_s - engine.now) / step_s) + 1, 1))
    engine.now += many * step_s
    engine.steps += many
