"""The fitted latency model of one (model, device, TP): `policy.views.CostModel` in plain arithmetic. Stdlib only.

    T(lane on u units, beside the other lane on v) = fixed + stretch(u, v) * sum(terms(u) * features)

Terms are non-negative and fall with u, so every prediction does. `stretch` is contention, as shared bandwidth: alone, u units
draw D(u); beside v units that draw `demand * D(v)` of the device's bandwidth they are left with

    D_eff(u, v) = min(D(u), D(all) - demand * D(v))      stretch = D(u) / D_eff * (1 + neighbour)

with `neighbour` for what is shared besides (caches, power, the host). When both lanes use some units (u + v above the
device's), it is (1 + shared + share * their part of u) instead. The output head of a prefill's last block is stretched by
another (1 + head) beside any lane.

No more units are ever slower among splits that are disjoint, and among those that overlap; between the two kinds nothing is
promised, because two threads on a core wait for each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from pdmux_ray.latency.features import BATCH_KNOTS, TOKEN_KNOTS, Curve, pairs
from pdmux_ray.policy.views import Estimate, Piece

SIZES_S = (0.004, 0.016, 0.064, 0.256)  # predicted times that part the cells of a guard
LEAST_BANDWIDTH = 0.02  # of the device's, for a lane beside any other
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Contention:
    """What the other lane costs one; all >= 0."""

    demand: float = 0.0  # bandwidth that the other lane draws, relative to what its units could
    neighbour: float = 0.0  # for each second, beside a lane on other units
    shared: float = 0.0  # for each second, beside a lane that uses some of the same units
    share: float = 0.0  # and that, times the part of one's units that the other lane uses
    head: float = 0.0  # for each second of the output head, on top: it reads many weights for few rows (prefill only)


@dataclass(frozen=True, slots=True)
class LaneModel:
    """Of one lane. `terms` [len(levels), features] in seconds, aligned with `features.DECODE` or `PREFILL`."""

    levels: tuple[int, ...]  # numbers of units that were measured, ascending
    fixed_s: float  # of a launch: no unit shortens it, no neighbour stretches it
    terms: tuple[tuple[float, ...], ...]
    beside: Contention

    def at(self, units: int) -> tuple[float, ...]:
        """Terms on so many units: linear between levels; under the lowest, as units shrink; above the highest, as there."""
        levels = self.levels
        if units <= levels[0]:
            return tuple(term * levels[0] / units for term in self.terms[0])
        if units >= levels[-1]:
            return self.terms[-1]
        high = next(i for i, level in enumerate(levels) if level >= units)
        share = (units - levels[high - 1]) / (levels[high] - levels[high - 1])
        return tuple(a + share * (b - a) for a, b in zip(self.terms[high - 1], self.terms[high], strict=True))


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a profile keeps. `bandwidth`: (units, bytes a second) of a stream triad, ascending.

    `guards` holds, for a cell's name and for each size of prediction (`SIZES_S`), by which factor measured times stay under
    the prediction 99 times of 100.
    """

    layers: int
    units: int
    switch_s: float
    bandwidth: tuple[tuple[int, float], ...]
    decode: LaneModel
    prefill: LaneModel
    mixed: tuple[float, ...]  # on every unit, aligned with `features.MIXED`
    guards: Mapping[str, tuple[float, ...]]


# Which steps share a residual quantile and a correction: kind (decode, prefill or mixed), units, units of the other lane (0:
# alone), size (index by SIZES_S).
Cell: TypeAlias = tuple[str, int, int, int]


def part_of(kind: str, units: int, beside: int) -> str:
    """The name of the cells of all sizes together."""
    return f"{kind} on {units} beside {beside}" if beside else f"{kind} on {units}"


def size_of(predicted_s: float) -> int:
    return bisect_right(SIZES_S, predicted_s)


def bandwidth_at(table: Sequence[tuple[int, float]], units: int) -> float:
    """Bytes a second of so many units: linear between those measured, in proportion below, constant above."""
    below, drawn = 0, 0.0
    for level, rate in table:
        if units <= level:
            return drawn + (rate - drawn) * (units - below) / (level - below)
        below, drawn = level, rate
    return drawn


def bandwidth_stretch(table: Sequence[tuple[int, float]], device_units: int, units: int, beside: int, demand: float) -> float:
    """D(units) / D_eff: 1 while the bandwidth is enough for both."""
    alone, whole = bandwidth_at(table, units), bandwidth_at(table, device_units)
    left = max(whole - demand * bandwidth_at(table, beside), LEAST_BANDWIDTH * whole)
    return max(alone / left, 1.0)


def stretch(table: Sequence[tuple[int, float]], device_units: int, units: int, beside: int, by: Contention) -> float:
    """Factor on everything but the fixed time of a lane on `units` beside a lane on `beside`; 1 alone."""
    if not beside:
        return 1.0
    both = max(units + beside - device_units, 0)
    more = by.shared + by.share * both / units if both else by.neighbour
    return bandwidth_stretch(table, device_units, units, beside, by.demand) * (1.0 + more)


_Guards = tuple[tuple[float, float], ...]  # of each size: factor on the prediction, least bound in seconds


class _Decode(NamedTuple):
    weights_s: float  # with the fixed time
    context_s: float
    batch: Curve
    guards: _Guards
    batches: dict[int, float]  # what `batch` has said


class _Layer(NamedTuple):
    """One layer of a prefill."""

    pieces: Sequence[Piece] | None  # None: of none
    layer_s: float


_NONE_ASKED = _Layer(None, 0.0)


@dataclass(slots=True)
class _Prefill:
    launch_s: float
    layer_s: float
    own_s: float
    cross_s: float
    reused_s: float
    pieces_s: float
    tokens: Curve
    head_s: float
    guards: _Guards
    # Asked for last: who looks for the most layers that keep an objective asks about the same one again and again.
    asked: _Layer = _NONE_ASKED


class FittedCosts:
    """A `CostModel` of measured parameters. A prediction takes microseconds; rows of terms are made on first use.

    For any thread: two that miss a row at once make the same one. Raises ValueError for units that the device does not have.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._decode: dict[tuple[int, int], _Decode] = {}
        self._prefill: dict[tuple[int, int], _Prefill] = {}
        self._pass_s, self._own_s, self._cross_s, self._reused_s, self._context_s, self._rows_s, *slopes = parameters.mixed
        self._mixed_tokens = Curve(TOKEN_KNOTS, slopes)
        self._mixed_guards = self._guards("mixed", parameters.units, 0)

    @property
    def switch_s(self) -> float:
        return max(self.parameters.switch_s, LEAST_S)

    def decode(self, batch: int, context_tokens: int, units: int, prefill_units: int) -> Estimate:
        row = self._decode.get((units, prefill_units)) or self._decode_row(units, prefill_units)
        batch_s = row.batches.get(batch)
        if batch_s is None:
            batch_s = row.batches[batch] = row.batch(batch)
        return _estimate(row.weights_s + row.context_s * context_tokens + batch_s, row.guards)

    def prefill(self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool) -> Estimate:
        row = self._prefill.get((units, decode_units)) or self._prefill_row(units, decode_units)
        asked = row.asked
        if asked.pieces != pieces:
            row.asked = asked = _Layer([*pieces], _layer_s(row, pieces))
        return _estimate(row.launch_s + layers * asked.layer_s + (row.head_s if last else 0.0), row.guards)

    def mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int) -> Estimate:
        if units != self.parameters.units:
            raise ValueError(f"a step in one pass uses all {self.parameters.units} units, not {units}")
        tokens, own, cross, reused = pairs(pieces)
        seconds = self._pass_s + self._own_s * own + self._cross_s * cross + self._reused_s * reused
        seconds += self._context_s * context_tokens + self._rows_s * (batch + len(pieces)) + self._mixed_tokens(tokens + batch)
        return _estimate(seconds, self._mixed_guards)

    def _decode_row(self, units: int, beside: int) -> _Decode:
        lane = self.parameters.decode
        weights, context, *batch = self._stretched(lane, units, beside)
        row = _Decode(lane.fixed_s + weights, context, Curve(BATCH_KNOTS, batch), self._guards("decode", units, beside), {})
        self._decode[units, beside] = row
        return row

    def _prefill_row(self, units: int, beside: int) -> _Prefill:
        lane = self.parameters.prefill
        layer, own, cross, reused, pieces, *tokens, head = self._stretched(lane, units, beside)
        row = _Prefill(
            lane.fixed_s,
            *(layer, own, cross, reused, pieces),
            *(Curve(TOKEN_KNOTS, tokens), head * (1 + lane.beside.head * bool(beside)), self._guards("prefill", units, beside)),
        )
        self._prefill[units, beside] = row
        return row

    def _stretched(self, lane: LaneModel, units: int, beside: int) -> tuple[float, ...]:
        """Terms beside the other lane; never less than what more units of the same kind of split need."""
        device = self.parameters.units
        if not (0 < units <= device and 0 <= beside <= device):
            raise ValueError(f"{units} units beside {beside}: the device has {device}")
        last = device if not beside or units + beside > device else device - beside
        worst = (0.0,) * len(lane.terms[0])
        for level in range(last, units - 1, -1):
            factor = stretch(self.parameters.bandwidth, device, level, beside, lane.beside)
            worst = tuple(max(a, factor * b) for a, b in zip(worst, lane.at(level), strict=True))
        return worst

    def _guards(self, kind: str, units: int, beside: int) -> _Guards:
        """With, for each size, the highest bound of any smaller one: what is predicted to take longer has no lower bound."""
        guards = self.parameters.guards.get(part_of(kind, units, beside)) or self.parameters.guards[kind]
        highest = accumulate((limit_s * guard for limit_s, guard in zip(SIZES_S, guards, strict=False)), max, initial=0.0)
        return tuple(zip(guards, highest, strict=True))


def _layer_s(row: _Prefill, pieces: Sequence[Piece]) -> float:
    tokens, own, cross, reused = pairs(pieces)
    layer_s = row.layer_s + row.own_s * own + row.cross_s * cross + row.reused_s * reused
    return layer_s + (row.pieces_s * len(pieces) + row.tokens(tokens))


def _estimate(seconds: float, guards: _Guards) -> Estimate:
    predicted_s = seconds if seconds > LEAST_S else LEAST_S
    guard, least_s = guards[bisect_right(SIZES_S, predicted_s)]
    bound_s = predicted_s * guard
    return Estimate(predicted_s, least_s if bound_s < least_s else bound_s)
