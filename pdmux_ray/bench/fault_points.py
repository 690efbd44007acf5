"""What `faults` does at one point: requests come, some of their clients leave, something happens to an instance meanwhile."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeAlias

from pdmux_ray.bench.fault_instance import Instance, News
from pdmux_ray.bench.handoffs import Verdict
from pdmux_ray.bench.namespaces import Namespaces, Side
from pdmux_ray.errors import PdmuxError

DECODE: Side = 0
PREFILL: Side = 1
TIMES = {"heartbeat_s": 0.1, "silence_s": 0.6, "accept_s": 0.5, "lease_s": 1.5, "drain_s": 0.3, "fetch_s": 10.0}
SILENT_S = TIMES["silence_s"] + 0.15  # within which a silent peer is noticed: so much a busy core may add
DEAD_S = 0.25  # within which a dead one is
LASTS_S = (0.1, 3 * TIMES["silence_s"])  # of what ends by itself: shorter and longer than it is waited for
SOON_S = 0.3
ANSWER_S = 30.0
CROWD = 16  # requests, more than an instance that prefills runs and lets wait

Agenda: TypeAlias = list[tuple[float, Callable[[], object]]]  # seconds from the begin of a point, and what happens then


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the tokens that must come of it."""

    prompt: list[int]
    params: dict[str, Any]
    tokens: list[int]


@dataclass(slots=True)
class Client:
    """Of one request."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    asked: bool = False
    left: bool = False
    ended: bool = False
    error: str | None = None

    @property
    def verdict(self) -> Verdict:
        if self.left:
            return "left" if self.tokens == self.case.tokens[: len(self.tokens)] else "wrong"
        if not self.ended or self.error is not None:
            return "failed"
        return "right" if self.tokens == self.case.tokens else "wrong"


class Clients:
    """Of all requests, by id. `heard` is called in any thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, Client] = {}
        self._changed = threading.Condition()

    def add(self, more: Mapping[str, Client]) -> None:
        self._by_id.update(more)

    def heard(self, news: Sequence[News]) -> None:
        with self._changed:
            for request_id, token, finish, error in news:
                client = self._by_id.get(request_id)
                if client is not None:
                    client.tokens += [] if token is None else [token]
                    client.ended, client.error = finish is not None or error is not None, error
            self._changed.notify_all()

    def wait(self, some: Collection[Client]) -> None:
        """Until all have ended; not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: all(client.ended for client in some), ANSWER_S)


class Pair:
    """An instance that decodes and one that prefills, linked. Close it.

    `start`: of a side, with a name, a host, and what else its Setup is to have.
    """

    def __init__(self, start: Callable[..., Instance], network: Namespaces | None) -> None:
        self.network = network
        self._start = start
        self._starts = 0
        self.sides = [self._fresh(DECODE), self._fresh(PREFILL)]
        self.introduce()

    @property
    def decode(self) -> Instance:
        return self.sides[DECODE]

    @property
    def prefill(self) -> Instance:
        return self.sides[PREFILL]

    def replace(self, side: Side, **differently: Any) -> None:
        """Starts another one in the place of a dead one. `differently`: of its Setup."""
        self.sides[side] = self._fresh(side, **differently)

    def introduce(self) -> None:
        """As gateways do."""
        self.decode.meet({self.prefill.name: self.prefill.address})

    def trouble(self) -> str | None:
        """Why not all is at rest: links, requests, transfers, pages."""
        for here, there in (self.sides, self.sides[::-1]):
            try:
                state = here.state()
            except PdmuxError as error:
                return str(error)
            if here.epoch_of(there.name) is None:
                return f"{here.name} is not linked to {there.name}"
            for what in ("requests", "leased_pages", "quarantined_pages", "held_pages"):
                if state[what]:
                    return f"{here.name} has {state[what]} {what.replace('_', ' ')}"
            if not state["at_rest"]:
                return f"{here.name} has a handoff that has not ended"
        return None

    def held_pages(self) -> int:
        held = 0
        for each in self.sides:
            with contextlib.suppress(PdmuxError):
                held += each.state()["held_pages"]
        return held

    def close(self) -> None:
        for each in self.sides:
            each.kill()

    def _fresh(self, side: Side, **differently: Any) -> Instance:
        self._starts += 1
        host = self.network.address(side) if self.network else "127.0.0.1"
        return self._start(side, **{"name": f"{'dp'[side]}{self._starts}", "host": host, **differently})


class Point:
    """The requests of one fault at one moment. Its methods are what an agenda is made of."""

    def __init__(self, name: str, pair: Pair, clients: Clients, cases: Sequence[Case], rng: random.Random) -> None:
        self.name = name
        self.pair = pair
        self.rng = rng
        self.noticed: list[Callable[[], tuple[float, float]]] = []  # seconds, and within which it was to be
        self._clients = {f"{name} {number}": Client(case) for number, case in enumerate(cases)}
        self._all = clients
        clients.add(self._clients)

    def arrivals(self, span_s: float, fault_s: float, leaving: float) -> Agenda:
        """The last request comes soon after the fault, the others in the first half; so many of the clients (a share) leave."""
        agenda: Agenda = []
        last = list(self._clients)[-1]
        for request_id in self._clients:
            at_s = fault_s + self.rng.uniform(0, SOON_S) if request_id == last else self.rng.uniform(0, span_s / 2)
            agenda.append((at_s, partial(self._ask, request_id)))
            if self.rng.random() < leaving:
                agenda.append((at_s + self.rng.uniform(0, span_s), partial(self._leave, request_id)))
        return agenda

    def play(self, agenda: Agenda) -> tuple[Verdict, ...]:
        begin_s = time.monotonic()
        for at_s, act in sorted(agenda, key=itemgetter(0)):
            time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            act()
        self._all.wait(self._clients.values())
        return tuple(client.verdict for client in self._clients.values())

    def kill(self, side: Side) -> None:
        self._expect(1 - side, self.pair.sides[side].kill, DEAD_S)

    def freeze(self, side: Side, for_s: float) -> None:
        self._expect(1 - side, self.pair.sides[side].freeze, SILENT_S, for_s)

    def thaw(self, side: Side) -> None:
        self.pair.sides[side].thaw()

    def cut(self, for_s: float, silently: bool) -> None:
        network = self.pair.network
        assert network is not None

        @cache
        def cut() -> float:
            network.cut(silently=silently)
            return time.monotonic()

        for side in (DECODE, PREFILL):
            self._expect(side, cut, SILENT_S, for_s)

    def heal(self) -> None:
        assert self.pair.network is not None
        self.pair.network.heal()

    def successor(self, side: Side, **differently: Any) -> None:
        """Takes the place of one that was killed. As gateways do, its requests go on there, after the tokens that there are."""
        self.pair.replace(side, **differently)
        self.pair.introduce()
        if side == DECODE:
            for request_id, client in self._clients.items():
                if client.asked and not (client.left or client.ended):
                    self._ask(request_id)
                client.ended = client.ended or client.left  # the end of who has left died with it

    def crowd(self) -> None:
        """Requests of its own at the instance that prefills, so many that it takes no others."""
        params = {"max_tokens": 1000, "temperature": 0.0, "ignore_eos": True}
        for number in range(CROWD):
            self.pair.prefill.request(f"crowd {self.name} {number}", [number + 3] * 3, params, [], [])

    def disperse(self) -> None:
        self.pair.prefill.leave([f"crowd {self.name} {number}" for number in range(CROWD)])

    def _ask(self, request_id: str) -> None:
        client, pair = self._clients[request_id], self.pair
        client.asked = True
        pair.decode.request(request_id, client.case.prompt, client.case.params, [pair.prefill.name], client.tokens)

    def _leave(self, request_id: str) -> None:
        client = self._clients[request_id]
        if not client.ended:
            client.left = True
            self.pair.decode.leave([request_id])

    def _expect(self, side: int, begin: Callable[[], float], limit_s: float, for_s: float = math.inf) -> None:
        """That this side notices that the other one has gone, if that lasts long enough. `begin`: does it, and says when."""
        watcher, gone = self.pair.sides[side], self.pair.sides[1 - side].name
        epoch = watcher.epoch_of(gone)
        at_s = begin()
        if for_s > limit_s and epoch is not None:
            self.noticed.append(lambda: (watcher.unlinked_after_s(gone, epoch, at_s), limit_s))


def _nothing(point: Point, at_s: float) -> Agenda:
    return []


def _refuse(point: Point, at_s: float) -> Agenda:
    """Its queue is full."""
    return [(at_s, point.crowd), (at_s + point.rng.uniform(*LASTS_S), point.disperse)]


def _other_version(point: Point, at_s: float) -> Agenda:
    """Whoever answers at the address of the instance that prefills cannot be a peer, for a while."""
    port = point.pair.prefill.port

    def back() -> None:
        point.pair.prefill.kill()
        point.successor(PREFILL, port=port)

    return [
        (at_s, partial(point.kill, PREFILL)),
        (at_s, partial(point.successor, PREFILL, port=port, compatible="with others")),
        (at_s + point.rng.uniform(*LASTS_S), back),
    ]


def _kill(side: Side, point: Point, at_s: float) -> Agenda:
    return [(at_s, partial(point.kill, side)), (at_s + point.rng.uniform(0, 1), partial(point.successor, side))]


def _restart(side: Side, point: Point, at_s: float) -> Agenda:
    """Under the same name and address, at once."""
    instance = point.pair.sides[side]
    again = partial(point.successor, side, name=instance.name, port=instance.port)
    return [(at_s, partial(point.kill, side)), (at_s, again)]


def _freeze(side: Side, point: Point, at_s: float) -> Agenda:
    for_s = point.rng.uniform(*LASTS_S)
    return [(at_s, partial(point.freeze, side, for_s)), (at_s + for_s, partial(point.thaw, side))]


def _partition(point: Point, at_s: float) -> Agenda:
    for_s = point.rng.uniform(*LASTS_S)
    return [(at_s, partial(point.cut, for_s, point.rng.random() < 0.5)), (at_s + for_s, point.heal)]


FAULTS: dict[str, Callable[[Point, float], Agenda]] = {
    "leave-client": _nothing,  # but that clients leave, and that there are fewer pages than the requests need
    "no-pages": _nothing,
    "refuse": _refuse,
    "other-version": _other_version,
    "kill-prefill": partial(_kill, PREFILL),
    "restart-prefill": partial(_restart, PREFILL),
    "freeze-prefill": partial(_freeze, PREFILL),
    "kill-decode": partial(_kill, DECODE),
    "restart-decode": partial(_restart, DECODE),
    "freeze-decode": partial(_freeze, DECODE),
    "partition": _partition,
}
