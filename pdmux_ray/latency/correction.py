"""Corrects a latency model while it is used: a `CostModel` that learns from what steps really took. Stdlib only.

    corrected prediction = prediction * exp(mean),   mean: EWMA of log(measured / predicted), per cell
    corrected bound      = corrected prediction * adaptive guard, which a drift alarm widens by DRIFT_WIDENING once

The adaptive guard begins as the profile's and follows the 99 % quantile of measured / corrected prediction, whatever its
distribution becomes (adaptive conformal inference, Gibbs and Candes 2021): a time above the bound raises its log by `WIDEN`,
one below lowers it by WIDEN / 99, so that it takes 99 times below to undo one above, and in the long run 1 % are above. A
profile's own guards are wide where the work that it measured had little in common: a bound of twice what steps take would
forbid splits that keep the objective.

A cell begins with what all sizes of its kind of work have taught, and a kind with what all kinds have: what slows one slows
most. And it returns there while only others are measured. Else whatever was slow for a moment would not be chosen again, and so
never be measured again, and stay slow for ever.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pdmux_ray.latency.model import SIZES_S, Cell, FittedCosts, part_of
from pdmux_ray.policy.views import CostModel, Estimate, Piece

WIDEN = 0.12  # of the log of the guard, for a time above the bound
NARROW = WIDEN / 99
WIDEST = math.log(8.0)  # over the profile's
LEAST_GUARD = 1.1  # times the corrected prediction: no bound is nearer
LEARN = 0.05  # weight of a new time in the mean, when there have been many
LEARN_FIRST = 4  # the first ones weigh as if so many had come before them
CLIP = 0.1  # a time counts as no further from the mean than this: so the mean stays near the median, of which few stalls know.
# The first ones count further: a mean that nears the truth by steps of this size leaves every time on the way above the bound.
FEW = 16  # times of others that nothing is forgotten for
TELLING = 100.0  # times of a cell after which its guard is half its own, and half everybody's
FORGET = 500.0  # times of others, after which a part of 1 / e is left of what sets a cell apart
DRIFT = math.log(1.3)  # a mean so far from the profile is a drift
DRIFT_AFTER = 50  # times of a cell
_LEAST_LOG = math.log(LEAST_GUARD)
CALM = DRIFT / 2  # and back under this is none any more
DRIFT_WIDENING = math.log(1.15)  # once: what the guard adapts to after that is told by the times

KINDS = ("decode", "prefill", "mixed")
PREDICTION_FACTOR, BOUND_FACTOR = "pdmux_prediction_factor", "pdmux_bound_factor"  # names of figures

log = logging.getLogger(__name__)

_Now: TypeAlias = tuple[float, float]  # mean and guard, by which prediction and bound of a cell are corrected


@dataclass(slots=True)
class _State:
    """Of one cell, of all cells of a part, or of everything: natural logs."""

    wider: _State | None  # where it begins, and returns to while others are measured; None: this is everything
    mean: float = 0.0
    guard: float = 0.0  # over the profile's; below 0 where it is narrower
    seen: int = 0
    drifting: bool = False
    told: bool = False
    last: int = 0  # how many times of any cell there were at its own last one

    def child(self) -> _State:
        return _State(self, self.mean, self.guard, 0, last=self.last)

    def now(self, times: int) -> _Now:
        """After so many times of any cell. Its guard counts as far as it has had enough of them to tell a 99 % quantile by."""
        if self.wider is None:
            return self.mean, self.guard
        mean, guard = self.wider.now(times)
        others = times - self.last
        kept = 1.0 if others <= FEW else math.exp(-others / FORGET)
        told = kept * self.seen / (self.seen + TELLING)
        return mean + kept * (self.mean - mean), guard + told * (self.guard - guard)

    def fade(self, times: int) -> None:
        """Before it learns again."""
        others = times - self.last
        if self.wider is None or others <= FEW:
            return
        (mean, guard), kept = self.wider.now(times), math.exp(-others / FORGET)
        self.mean = mean + kept * (self.mean - mean)
        self.guard = guard + kept * (self.guard - guard)


@dataclass(frozen=True, slots=True)
class Figures:
    """For metrics."""

    drifting: int  # cells whose times have moved away from the profile
    correction: float  # of the cell that is furthest from the profile: measured / predicted
    observed: int  # times
    exceeded: int  # times above their bound
    # Kind of work -> what corrects its prediction and its bound, where it has every unit and nothing runs beside it.
    factors: Mapping[str, tuple[float, float]]

    def exported(self) -> dict[str, float | dict[str, float]]:
        """By the names that `metrics.catalog` explains."""
        return {
            PREDICTION_FACTOR: {kind: factor for kind, (factor, _) in self.factors.items()},
            BOUND_FACTOR: {kind: factor for kind, (_, factor) in self.factors.items()},
            "pdmux_drifting_cells": self.drifting,
            "pdmux_correction_factor": self.correction,
            "pdmux_predicted_times_total": self.observed,
            "pdmux_exceeded_bounds_total": self.exceeded,
        }


class Lesson(NamedTuple):
    """What steps of a kind have taught: how many times as long they take as the profile says."""

    kind: str  # decode, prefill or mixed
    units: int
    beside: int  # units of the other lane; 0: alone
    size: int | None  # index by SIZES_S; None: of all sizes
    factor: float
    times: int  # that it was learned from


class CorrectedCosts:
    """A `LearningCostModel` over a fitted one. `observe_*` are for the step loop's thread; predictions and `figures` are for
    any, which at worst sees a cell whose mean and guard are one time apart.

    Each cell follows what was measured, so for a while more units may be predicted to be slower: then they were. And at the
    border of two sizes less work may be predicted to take longer: who looks for the most work that keeps an objective
    (`largest_that_fits` of `policy/sharing.py`) then finds some that keeps it, not always the most.
    """

    def __init__(self, base: FittedCosts, lessons: Iterable[Lesson] = ()) -> None:
        """`lessons`: as if it had just learned these."""
        self._base = base
        self._cells: dict[Cell, _State] = {}
        self._parts: dict[tuple[str, int, int], _State] = {}  # all sizes together: where a new cell begins
        self._all = _State(None)  # all kinds together: where a new part begins
        self._observed = self._exceeded = 0
        self._factors_now: dict[Cell, tuple[float, float]] = {}  # since something was learned last
        self._decoded: tuple[tuple[int, int, int, int], Estimate] | None = None  # what the profile was asked last
        self._begin_with([lesson for lesson in lessons if lesson.times])

    @property
    def switch_s(self) -> float:
        return self._base.switch_s

    def decode(self, batch: int, context_tokens: int, units: int, prefill_units: int) -> Estimate:
        return self._corrected("decode", units, prefill_units, self._decode((batch, context_tokens, units, prefill_units)))

    def prefill(self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool) -> Estimate:
        return self._corrected("prefill", units, decode_units, self._base.prefill(pieces, layers, units, decode_units, last))

    def mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int) -> Estimate:
        return self._corrected("mixed", units, 0, self._base.mixed(batch, context_tokens, pieces, units))

    def observe_decode(self, batch: int, context_tokens: int, units: int, prefill_units: int, seconds: float) -> None:
        self._learn("decode", units, prefill_units, self._decode((batch, context_tokens, units, prefill_units)), seconds)

    def observe_prefill(
        self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool, seconds: float
    ) -> None:
        self._learn("prefill", units, decode_units, self._base.prefill(pieces, layers, units, decode_units, last), seconds)

    def observe_mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int, seconds: float) -> None:
        self._learn("mixed", units, 0, self._base.mixed(batch, context_tokens, pieces, units), seconds)

    def learn_again(self, kind: str, units: int, beside: int, corrected_s: float, seconds: float) -> float:
        """From a time of which is only known what the prediction, corrected, was. What the profile had predicted."""
        cells = [(kind, units, beside, size) for size in range(len(SIZES_S) + 1)]
        found_s = [corrected_s / self._factors_of(cell)[0] for cell in cells]
        base_s = next((one_s for size, one_s in enumerate(found_s) if bisect_right(SIZES_S, one_s) == size), corrected_s)
        self._learn(kind, units, beside, Estimate(base_s, LEAST_GUARD * base_s), seconds)
        return base_s

    def figures(self) -> Figures:
        states = [state for state in list(self._cells.values()) if state.seen]
        furthest = max((state.mean for state in states), key=abs, default=0.0)
        drifting = sum(state.drifting for state in states)
        return Figures(drifting, math.exp(furthest), self._observed, self._exceeded, self._factors())

    def lessons(self) -> list[Lesson]:
        """All that it has learned, as it would predict by it now. From any thread."""
        parts = [self._lesson(*part, None) for part in list(self._parts)]
        return [*parts, *(self._lesson(*cell) for cell in list(self._cells))]

    def _begin_with(self, lessons: Sequence[Lesson]) -> None:
        parts = [lesson for lesson in lessons if lesson.size is None]
        times = self._all.seen = self._all.last = sum([lesson.times for lesson in parts])
        if times:
            self._all.mean = sum([lesson.times * math.log(lesson.factor) for lesson in parts]) / times
        for kind, units, beside, size, factor, seen in sorted(lessons, key=lambda lesson: lesson.size is not None):
            wider = self._all if size is None else self._parts[kind, units, beside]
            state = _State(wider, math.log(factor), self._all.guard, seen, told=True, last=times)
            if size is None:
                self._parts[kind, units, beside] = state
            else:
                self._cells[kind, units, beside, size] = state

    def _lesson(self, kind: str, units: int, beside: int, size: int | None) -> Lesson:
        state = self._parts[kind, units, beside] if size is None else self._cells[kind, units, beside, size]
        return Lesson(kind, units, beside, size, math.exp(state.now(self._all.seen)[0]), state.seen)

    def _factors(self) -> dict[str, tuple[float, float]]:
        units = self._base.parameters.units
        measured = [(kind, part) for kind in KINDS if (part := self._parts.get((kind, units, 0)))]
        found = {kind: part.now(self._all.seen) for kind, part in measured}
        return {kind: (math.exp(mean), math.exp(mean + guard)) for kind, (mean, guard) in found.items()}

    def _corrected(self, kind: str, units: int, beside: int, base: Estimate) -> Estimate:
        predicted_s, bound_s = base
        cell = (kind, units, beside, bisect_right(SIZES_S, predicted_s))
        factor, widened = self._factors_now.get(cell) or self._factors_of(cell)
        least_s = LEAST_GUARD * predicted_s
        least_s = (bound_s if bound_s < least_s else least_s) * factor
        widened_s = bound_s * widened
        return Estimate(predicted_s * factor, least_s if widened_s < least_s else widened_s)

    def _decode(self, asked: tuple[int, int, int, int]) -> Estimate:
        """What the profile says of a step: often asked twice, when it is planned and when it has been taken."""
        last = self._decoded
        if last is None or last[0] != asked:
            self._decoded = last = (asked, self._base.decode(*asked))
        return last[1]

    def _factors_of(self, cell: Cell) -> tuple[float, float]:
        """On a prediction and on its bound; remembered until something is learned."""
        remembered = self._factors_now
        state = self._cells.get(cell) or self._parts.get(cell[:3]) or self._all
        mean, guard = state.now(self._all.seen)
        remembered[cell] = factors = (math.exp(mean), math.exp(mean + guard))
        return factors

    def _learn(self, kind: str, units: int, beside: int, base: Estimate, seconds: float) -> None:
        predicted_s, bound_s = base
        cell = (kind, units, beside, bisect_right(SIZES_S, predicted_s))
        state, everybody = self._cells.get(cell) or self._begin(cell), self._all
        part = state.wider
        assert part is not None
        self._observed += 1
        self._exceeded += seconds > self._corrected(kind, units, beside, base).bound_s
        state.fade(everybody.seen)
        part.fade(everybody.seen)
        distance, profiled = math.log(max(seconds, 1e-9) / predicted_s), math.log(bound_s / predicted_s)
        _teach((everybody, part, state), distance, profiled)
        self._watch(state, kind, units, beside)
        self._factors_now = {}

    def _begin(self, cell: Cell) -> _State:
        part = self._parts.get(cell[:3])
        if part is None:
            part = self._parts[cell[:3]] = self._all.child()
        self._cells[cell] = state = part.child()
        self._factors_now = {}
        return state

    def _watch(self, state: _State, kind: str, units: int, beside: int) -> None:
        far = abs(state.mean)
        if state.seen < DRIFT_AFTER or not (far > DRIFT or (state.drifting and far > CALM)):
            state.drifting = False
            return
        if not state.drifting:
            state.drifting = True
            widening = DRIFT_WIDENING * (state.seen + TELLING) / state.seen  # of which `now` counts a part
            state.guard = min(state.guard + widening, WIDEST)
        if not state.told:
            state.told = True
            log.warning(
                "latency drift: %s takes %.2f times what the profile says; predictions are corrected and their bounds widened. "
                "If it stays, something else uses the device, or the profile is old: run `pdmux profile` again",
                part_of(kind, units, beside),
                math.exp(state.mean),
            )


@dataclass(frozen=True, slots=True)
class ToldCosts:
    """A `CostModel` for somebody else than the instance that learns: the profile with that one's corrections, which are one
    for all sizes of a kind of work. Of lanes beside each other it says what the profile says, as if they were alone."""

    base: CostModel
    prediction_factor: Mapping[str, float]
    bound_factor: Mapping[str, float]

    @property
    def switch_s(self) -> float:
        return self.base.switch_s

    def decode(self, batch: int, context_tokens: int, units: int, prefill_units: int) -> Estimate:
        return self._told("decode", self.base.decode(batch, context_tokens, units, prefill_units))

    def prefill(self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool) -> Estimate:
        return self._told("prefill", self.base.prefill(pieces, layers, units, decode_units, last))

    def mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int) -> Estimate:
        return self._told("mixed", self.base.mixed(batch, context_tokens, pieces, units))

    def _told(self, kind: str, base: Estimate) -> Estimate:
        predicted_s, bound_s = base
        return Estimate(predicted_s * self.prediction_factor.get(kind, 1.0), bound_s * self.bound_factor.get(kind, 1.0))


def _teach(states: Sequence[_State], distance: float, profiled: float) -> None:
    """`states`: everybody's first. `distance`: log(measured / predicted), before any correction; `profiled`: log(bound /
    predicted), likewise."""
    narrowest, times = _LEAST_LOG - profiled if profiled > _LEAST_LOG else 0.0, states[0].seen + 1
    for state in states:
        off = distance - state.mean
        guard = state.guard + (WIDEN if off > profiled + state.guard else -NARROW)
        state.guard = narrowest if guard < narrowest else WIDEST if guard > WIDEST else guard
        state.seen += 1
        state.last = times
        first = 1 / (LEARN_FIRST + state.seen)
        clip = LEARN_FIRST * first if LEARN_FIRST * first > CLIP else CLIP
        state.mean += (first if first > LEARN else LEARN) * (clip if off > clip else -clip if off < -clip else off)
