"""What is known of a step before it is decided who prefills: who can decode, who may start, and at what pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdmux_ray.policy.batching import Room, pages_to_grow, preempt, without
from pdmux_ray.policy.lane_limits import LaneLimits
from pdmux_ray.policy.sharing import Decodes, capped_splits, fewest_units
from pdmux_ray.policy.urgency import Pace
from pdmux_ray.policy.views import CostModel, JobView, LanesView, Piece, RequestView
from pdmux_ray.types import Mode

SLOWEST = 10.0  # how much slower than alone a prefill is thought to be when decodes leave no time at all


@dataclass(frozen=True, slots=True)
class LaneStep:
    """A step that is being planned. Pages are reserved for every one of `decoding` to grow."""

    view: LanesView
    limits: LaneLimits
    costs: CostModel | None
    decoding: Sequence[RequestView]
    preempted: Sequence[RequestView]
    jobs: Sequence[JobView]  # without those of which a request is preempted
    startable: Sequence[RequestView]  # whom no job computes
    free_pages: int
    places: int
    decodes: Decodes
    pace: Pace | None  # how long a prefill takes, as far as can be said before the mode is chosen

    def room(self) -> Room:
        return Room(self.view.page_size, self.free_pages, self.places)

    @property
    def deciding_pace(self) -> Pace | None:
        """What decides who prefills and together with whom: nothing does that is predicted, when a rule says what steps do."""
        return self.pace if self.limits.rule is None else None

    @property
    def held(self) -> JobView | None:
        """The job of which a block is in flight."""
        for job in self.jobs:
            if job.in_flight:
                return job
        return None


def lane_step(view: LanesView, limits: LaneLimits, costs: CostModel | None) -> LaneStep:
    """Preempts when the decodes cannot grow: then none of the waiting starts."""
    decoding, prefilling, jobs = view.decoding, view.prefilling, view.jobs
    free_pages = view.free_pages - pages_to_grow(decoding, view.page_size)
    preempted: list[RequestView] = []
    if free_pages < 0:
        preempted = preempt(view, _preemptible(view))
        decoding, prefilling = without(decoding, preempted), without(prefilling, preempted)
        gone = {request.request_id for request in preempted}
        jobs = [job for job in jobs if gone.isdisjoint([request.request_id for request in job.requests])]
    computed = {request.request_id for job in jobs for request in job.requests}
    startable = [request for request in prefilling if request.request_id not in computed]
    if not preempted:
        startable.extend(view.waiting)
    places = limits.max_batch - len(decoding) - len(prefilling) - len(view.transferring)
    decodes = Decodes(len(decoding), sum([request.known_tokens for request in decoding]))
    pace = None if costs is None else _LazyPace(partial(_pace, view, limits, costs, decodes))
    return LaneStep(view, limits, costs, decoding, preempted, jobs, startable, free_pages, places, decodes, pace)


def mode_in_force(view: LanesView, limits: LaneLimits) -> Mode:
    """The configured one; for AUTO that of the last step."""
    return view.mode if limits.mode is Mode.AUTO else limits.mode


def _preemptible(view: LanesView) -> list[RequestView]:
    """All but those whose pages a block in flight is writing."""
    written = {request.request_id for job in view.jobs if job.in_flight for request in job.requests}
    return [request for request in [*view.decoding, *view.prefilling] if request.request_id not in written]


class _LazyPace:
    """One that is found when somebody asks: most steps prefill nobody anew."""

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], Pace]) -> None:
        self._find = find
        self._found: Pace | None = None

    def __call__(self, pieces: Sequence[Piece], layers: int) -> float:
        if self._found is None:
            self._found = self._find()
        return self._found(pieces, layers)


def _pace(view: LanesView, limits: LaneLimits, costs: CostModel, decodes: Decodes) -> Pace:
    """A prefill's speed in the mode in force: on its units beside the decodes, or in the time that they leave over."""
    units = view.units
    if not decodes.batch:
        return partial(_prefill_s, costs, units, 0, 1.0)
    mode = mode_in_force(view, limits)
    if mode in (Mode.SPLIT, Mode.CAPPED) and view.splits:
        splits = view.splits if mode is Mode.SPLIT else capped_splits(view)
        if limits.rule is not None:
            splits = [limits.rule.choose(decodes.batch, 1, view.layers)[0]]
        split, _ = fewest_units(costs, decodes, splits, limits.itl_s)
        return partial(_prefill_s, costs, split.prefill_units, split.decode_units, 1.0)
    left_over = 1.0 - costs.decode(*decodes, units, 0).bound_s / limits.itl_s
    return partial(_prefill_s, costs, units, 0, 1.0 / max(left_over, 1.0 / SLOWEST))


def _prefill_s(costs: CostModel, units: int, decode_units: int, stretch: float, pieces: Sequence[Piece], layers: int) -> float:
    return costs.prefill(pieces, layers, units, decode_units, last=True).predicted_s * stretch
