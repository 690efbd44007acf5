"""Where the placement controller has its figures from: the instances themselves, or a Prometheus that scrapes them.

Both give the same ones: rates of what the instances have computed, over WINDOW_S, and what they have to do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from pdmux_ray.metrics.prometheus import PrometheusError, Series
from pdmux_ray.metrics.rules import PLACEMENT_WINDOW_S
from pdmux_ray.policy.demand import FleetFigures
from pdmux_ray.serve.placer import Seen
from pdmux_ray.serve.wire import Figures
from pdmux_ray.types import Role

WINDOW_S = PLACEMENT_WINDOW_S  # of the rates; the recording rules have it in their names
LEAST_S = 5.0  # of it that must have passed, for the first rates

PREFILL, GENERATED, FINISHED = (
    f"app:pdmux_{what}:rate{WINDOW_S:g}s" for what in ("prefill_tokens", "engine_generated_tokens", "engine_finished")
)
RUNNING, WAITING, DECODING, CONTEXT, QUEUED = (
    f"role:pdmux_{what}:sum"
    for what in ("running_requests", "waiting_requests", "decoding_requests", "decode_context_tokens", "queued_prefill_tokens")
)
INSTANCES = "role:pdmux_instances:count"
RULES = (PREFILL, GENERATED, FINISHED, RUNNING, WAITING, DECODING, CONTEXT, QUEUED, INSTANCES)

log = logging.getLogger("ray.serve")


class _Totals(NamedTuple):
    prefill_tokens: float = 0.0
    generated_tokens: float = 0.0
    finished: float = 0.0

    def plus(self, now: _Totals, before: _Totals) -> _Totals:
        """With what was done since."""
        return _Totals(*(mine + max(b - a, 0.0) for mine, b, a in zip(self, now, before, strict=True)))


class Window:
    """The figures of the instances themselves. Owner: whoever looks, about once a second."""

    def __init__(self) -> None:
        self._last: dict[str, _Totals] = {}  # by instance, of those that there were at the last look and that had told any
        self._sums: deque[tuple[float, _Totals]] = deque()  # of all, since the begin, by when; the oldest is WINDOW_S old

    def take(self, now: float, seen: Sequence[Seen]) -> FleetFigures | None:
        """What all have computed, and what those have to do that can be given requests; None when there are none of these, or
        for the first seconds."""
        fit = [each for each in seen if each.fit and each.load is not None]
        self._count(now, [each for each in seen if each.figures])
        (then, before), (_, total) = self._sums[0], self._sums[-1]
        if not fit or now - then < LEAST_S:
            return None
        prefilled, generated, finished = ((b - a) / (now - then) for a, b in zip(before, total, strict=True))
        loads = [(each.role, each.load) for each in fit if each.load is not None]
        served = [load for role, load in loads if role is not Role.PREFILL]
        return FleetFigures(
            taken_s=min(each.load_s for each in fit),
            prefill_tokens_per_s=prefilled,
            generated_tokens_per_s=generated,
            finished_per_s=finished,
            queued_prefill_tokens=sum(load.queued_prefill_tokens for _, load in loads),
            decoding=sum(load.decoding for _, load in loads),
            decode_context_tokens=sum(load.decode_context_tokens for _, load in loads),
            running=sum(load.running for load in served),
            waiting=sum(load.waiting for load in served),
        )

    def _count(self, now: float, told: Sequence[Seen]) -> None:
        """What one that is new has done before it came is not counted."""
        totals = {each.instance_id: _totals(each.figures) for each in told}
        total = self._sums[-1][1] if self._sums else _Totals()
        for name, its in totals.items():
            total = total.plus(its, self._last.get(name, its))
        self._last = totals
        self._sums.append((now, total))
        while len(self._sums) > 1 and self._sums[1][0] <= now - WINDOW_S:
            self._sums.popleft()


def _totals(figures: Figures) -> _Totals:
    names = ("pdmux_prefill_tokens_total", "pdmux_engine_generated_tokens_total", "pdmux_engine_finished_total")
    values = (figures.get(name, 0.0) for name in names)
    return _Totals(*(sum(value.values()) if isinstance(value, Mapping) else value for value in values))


class Server(Protocol):
    """A `Prometheus`, or one that stands in for it."""

    def query(self, expr: str, at_s: float | None = None) -> list[Series]: ...


class PrometheusSource:
    """What the recording rules make of the instances' figures. What it cannot have is said once, and leaves the old ones.
    Owner: one event loop, whose threads ask."""

    def __init__(self, server: Server, app: str) -> None:
        """`app`: the Serve application's name, a label of all its series."""
        self._server = server
        names = "|".join(RULES)
        self._query = f'{{__name__=~"{names}",app="{app}"}}'
        self._age = f'time() - min(timestamp({DECODING}{{app="{app}"}}))'
        self._newest: FleetFigures | None = None
        self._trouble: str | None = None

    async def take(self, now: float, instances: int) -> FleetFigures | None:
        """The newest that there are, which may be old. `instances`: that there are figures of, at least."""
        trouble = None
        try:
            begin_s = time.monotonic()
            found, ages = await asyncio.to_thread(self._ask)
            trouble = _trouble(found, ages, instances)
            if trouble is None:
                self._newest = fleet_figures(found, now - ages[0].value - (time.monotonic() - begin_s))
        except PrometheusError as error:
            trouble = str(error)
        if trouble is not None and trouble != self._trouble:
            log.warning("Placement: no new figures: %s", trouble)
        self._trouble = trouble
        return self._newest

    def _ask(self) -> tuple[list[Series], list[Series]]:
        return self._server.query(self._query), self._server.query(self._age)


def _trouble(found: Sequence[Series], ages: Sequence[Series], instances: int) -> str | None:
    """Why these figures cannot be gone by; None when they can."""
    there = {each.labels.get("__name__") for each in found}
    missing = [name for name in RULES if name not in there]
    if missing or not ages:
        return f"Prometheus has no {', '.join(missing) or DECODING}: does it scrape all, and evaluate the rules?"
    wrong = [each for each in (*found, *ages) if not 0 <= each.value < math.inf]
    if wrong:
        return f"Prometheus says {wrong[0].value} of {wrong[0].labels.get('__name__', 'the age of its figures')}"
    if (counted := _summed(found, INSTANCES)) < instances:
        return f"Prometheus has figures of {counted:g} instances, and there are {instances}: does it reach the port of each?"
    return None


def _summed(found: Sequence[Series], name: str, roles: Collection[Role] = tuple(Role)) -> float:
    named = [each for each in found if each.labels.get("__name__") == name]
    return sum(each.value for each in named if each.labels.get("role", Role.MUX) in roles)


def fleet_figures(found: Sequence[Series], taken_s: float) -> FleetFigures:
    """From one instant's values of all RULES."""
    of = partial(_summed, found)

    served = (Role.MUX, Role.DECODE)
    return FleetFigures(
        taken_s=taken_s,
        prefill_tokens_per_s=of(PREFILL),
        generated_tokens_per_s=of(GENERATED),
        finished_per_s=of(FINISHED),
        queued_prefill_tokens=of(QUEUED),
        decoding=of(DECODING),
        decode_context_tokens=of(CONTEXT),
        running=of(RUNNING, served),
        waiting=of(WAITING, served),
    )
