"""Refuses a request whose first token would come too late, at once and in its caller's thread.

The step loop's state changes under way, so what a caller judges by is a note of who was in which queue, and how the device was
shared, when its step began. The requests and jobs in it are the engine's own and go on: it sees how far they are by now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmux_ray.engine.jobs import Job
from pdmux_ray.engine.lanes import LaneScheduler
from pdmux_ray.engine.pages import Hit
from pdmux_ray.engine.request import Request
from pdmux_ray.errors import QueueFullError
from pdmux_ray.policy.admission import TtftObjective, admit
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.views import CostModel, Piece, RequestView
from pdmux_ray.types import Mode, Split


@dataclass(frozen=True, slots=True)
class Standing:
    """A `policy.views.LanesView` with the queues and the split of one moment. It looks up no prefixes, and has a page for every
    decode: nobody is preempted in a prediction."""

    now: float
    page_size: int
    free_pages: int
    decoding: Sequence[Request]
    prefilling: Sequence[Request]
    waiting: Sequence[Request]
    transferring: Sequence[Request]
    layers: int
    units: int
    splits: Sequence[Split]
    split: Split
    mode: Mode
    mode_since_s: float
    jobs: Sequence[Job]

    def prefix_hit(self, request: RequestView) -> Hit:
        return Hit((), 0, 0)

    def pages_freed(self, requests: Sequence[RequestView]) -> int:
        return 0


class Admitter:
    """`look` is for the step loop's thread, when a step begins; `check` for any, while no other request is being enqueued."""

    def __init__(self, lanes: LaneScheduler, limits: LaneLimits, costs: CostModel, objective: TtftObjective) -> None:
        self._lanes = lanes
        self._limits = limits
        self._costs = costs
        self._objective = objective
        self.look()

    def look(self) -> None:
        lanes = self._lanes
        decoding = lanes.decoding.noted
        self._standing = Standing(  # at once: others read it
            now=-math.inf,  # whoever reads it says when
            page_size=lanes.page_size,
            free_pages=len(decoding),
            decoding=decoding,
            prefilling=lanes.prefilling.noted,
            waiting=lanes.waiting.noted,
            transferring=lanes.transferring.noted,
            layers=lanes.layers,
            units=lanes.units,
            splits=lanes.splits,
            split=lanes.split,
            mode=lanes.mode,
            mode_since_s=lanes.mode_since_s,
            jobs=tuple(lanes.jobs),
        )

    def check(self, request: Request, enqueued: Sequence[Request], now: float) -> None:
        """`enqueued`: who came since the last `look`. Raises QueueFullError when the first token is predicted to miss its
        objective, with how late it would be as the time after which to try again."""
        lanes, standing = self._lanes, self._standing
        view = replace(standing, now=now, waiting=(*standing.waiting, *enqueued))
        hit = request.prefix_hit(lanes.pool)
        new = Piece(request.known_tokens - hit.tokens, hit.tokens)
        admission = admit(view, new, self._limits, self._costs, self._objective)
        lanes.counters.admissions[admission.reason] += 1
        if not admission.accept:
            raise QueueFullError(len(view.waiting), admission.retry_after_s, admission.predicted_ttft_s)
