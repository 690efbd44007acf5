"""From records to a latency model: non-negative, unit-monotone terms, contention, and conformal quantiles of what is left.

Errors are relative throughout, and each record counts once, with its median.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdmux_ray.errors import PdmuxError
from pdmux_ray.latency.features import BATCH_KNOTS, MIXED, PREFILL, TOKEN_KNOTS, decode_row, mixed_row, prefill_row
from pdmux_ray.latency.model import (
    LEAST_S,
    SIZES_S,
    Contention,
    FittedCosts,
    LaneModel,
    Parameters,
    bandwidth_at,
    bandwidth_stretch,
    part_of,
    size_of,
    stretch,
)
from pdmux_ray.latency.nonneg import Floats, falling_nnls, nnls
from pdmux_ray.latency.records import Kind, Quality, Record, percentile, select

COVERAGE = 0.99  # of a bound
FEW_COVERAGE = 0.95  # that must do to tell a cell of few times from its part
FOLDS = 5
DEMANDS = np.linspace(0.0, 2.0, 201)  # that are tried

Bandwidth = tuple[tuple[int, float], ...]


class TooFewSamplesError(PdmuxError):
    """A quantile of 99 % needs at least 99 samples."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the fit must know besides the records. `bandwidth`: (units, bytes a second), ascending."""

    layers: int
    units: int
    bandwidth: Bandwidth
    switch_s: float


def fit(records: Sequence[Record], device: DeviceFacts) -> Parameters:
    """Of all records but those to test. Raises TooFewSamplesError, or ValueError when a kind of work has no record.

    The quantiles are cross-conformal (Vovk 2015): each record is compared with a model that was fitted without it and without
    all records of the same work, so that every record calibrates, and not only a few kinds of work.
    """
    known = [record for record in records if record.role != "test"]
    places = {work: place for place, work in enumerate(sorted({_work(record) for record in known}))}
    residuals: list[tuple[Record, float]] = []
    for fold in range(FOLDS):
        left_out = [record for record in known if places[_work(record)] % FOLDS == fold]
        costs = FittedCosts(_terms([record for record in known if places[_work(record)] % FOLDS != fold], device))
        residuals += [(record, predicted_s(costs, record)) for record in left_out]
    return replace(_terms(known, device), guards=guards_of(residuals))


def _work(record: Record) -> tuple[object, ...]:
    return record.kind, record.units, record.beside, record.batch, record.context_tokens, record.pieces


def _terms(records: Sequence[Record], device: DeviceFacts) -> Parameters:
    """Without guards."""
    decode, prefill = _fit_decode(records, device), _fit_prefill(records)
    return Parameters(
        layers=device.layers,
        units=device.units,
        switch_s=device.switch_s,
        bandwidth=device.bandwidth,
        decode=_beside(decode, select(records, "decode", alone=False), device, _decode_rest),
        prefill=_prefill_beside(prefill, select(records, "prefill", alone=False), device),
        mixed=_fit_mixed(select(records, "mixed")),
        guards={kind: (1.0,) * (len(SIZES_S) + 1) for kind in ("decode", "prefill", "mixed")},
    )


def predicted_s(costs: FittedCosts, record: Record) -> float:
    return estimate(costs, record)[0]


def estimate(costs: FittedCosts, record: Record) -> tuple[float, float]:
    """(predicted, bound) in seconds."""
    if record.kind == "decode":
        return costs.decode(record.batch, record.context_tokens, record.units, record.beside)
    if record.kind == "prefill":
        return costs.prefill(record.pieces, record.layers, record.units, record.beside, record.last)
    return costs.mixed(record.batch, record.context_tokens, record.pieces, record.units)


def _fit_decode(records: Sequence[Record], device: DeviceFacts) -> LaneModel:
    solo = select(records, "decode", alone=True)
    levels, level_of, targets = _levels(solo, "decode")
    rows = np.array([decode_row(r.batch, r.context_tokens) for r in solo])
    terms, _ = falling_nnls(levels, level_of, rows, np.zeros((len(solo), 0)), targets)
    _extend(terms, 2, len(BATCH_KNOTS))
    fixed_s = _fixed(levels, terms[:, 0], device)
    terms[:, 0] -= fixed_s
    return LaneModel(tuple(levels), fixed_s, _tuples(terms), Contention())


def _fixed(levels: Sequence[int], constant: Floats, device: DeviceFacts) -> float:
    """The part of a decode step's constant that is not bandwidth: constant = fixed + weight bytes / D(units), both >= 0."""
    if len(levels) == 1:
        return 0.0
    slowness = [1 / bandwidth_at(device.bandwidth, level) for level in levels]
    fixed_s, _ = nnls(np.column_stack([np.ones(len(levels)), slowness]), constant)
    return min(float(fixed_s), float(constant.min()))


def _fit_prefill(records: Sequence[Record]) -> LaneModel:
    solo = select(records, "prefill", alone=True)
    levels, level_of, targets = _levels(solo, "prefill")
    rows = np.array([prefill_row(r.pieces, r.layers, r.last) for r in solo])
    terms, (launch_s,) = falling_nnls(levels, level_of, rows, np.ones((len(solo), 1)), targets)
    _extend(terms, PREFILL.index("pieces") + 1, len(TOKEN_KNOTS))
    return LaneModel(tuple(levels), float(launch_s), _tuples(terms), Contention())


def _fit_mixed(records: Sequence[Record]) -> tuple[float, ...]:
    if not records:
        raise ValueError("no mixed step was measured")
    rows = np.array([mixed_row(r.batch, r.context_tokens, r.pieces) for r in records])
    medians = np.array([r.median_s for r in records])
    terms = nnls(rows / medians[:, None], np.ones(len(records)))[None]
    _extend(terms, MIXED.index("rows") + 1, len(TOKEN_KNOTS))
    return _tuples(terms)[0]


def _levels(records: Sequence[Record], kind: str) -> tuple[list[int], list[int], Floats]:
    """Levels, the level of each record, and the median of each [M]."""
    if not records:
        raise ValueError(f"no {kind} was measured alone")
    level_of = [record.units for record in records]
    return sorted(set(level_of)), level_of, np.array([record.median_s for record in records])


def _extend(terms: Floats, first: int, count: int) -> None:
    """Gives the segments beyond the largest count measured the slope of the last one that has any."""
    for level in terms:
        slopes = level[first : first + count]
        (seen,) = np.nonzero(slopes)
        if len(seen):
            slopes[seen[-1] + 1 :] = slopes[seen[-1]]


def _tuples(terms: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(term) for term in level) for level in terms)


def _decode_rest(lane: LaneModel, record: Record) -> float:
    return float(np.dot(lane.at(record.units), decode_row(record.batch, record.context_tokens)))


def _prefill_rest(lane: LaneModel, record: Record) -> float:
    return float(np.dot(lane.at(record.units), prefill_row(record.pieces, record.layers, record.last)))


def _beside(
    lane: LaneModel, records: Sequence[Record], device: DeviceFacts, rest_s: Callable[[LaneModel, Record], float]
) -> LaneModel:
    """The lane with the contention that explains the co-runs best. The demand is searched for, the rest solved for.

    Each pair of (units, units beside) counts once, with the median over its times: lanes that share a unit take turns on it, so
    single times lie far apart.
    """
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in records:
        expected_s = max(rest_s(lane, record), LEAST_S)  # 0 when all of its time is the launch
        ratios[record.units, record.beside] += [max(took_s - lane.fixed_s, 1e-9) / expected_s for took_s in record.times_s]
    if not ratios:
        return lane
    medians = np.array([percentile(times, 50) for times in ratios.values()])
    both = np.array([max(units + beside - device.units, 0) / units for units, beside in ratios])
    more = np.column_stack([both == 0, both > 0, both]).astype(float)  # neighbour, shared, share
    found: list[tuple[float, float, Floats]] = []
    for demand in map(float, DEMANDS):
        bandwidth = np.array([bandwidth_stretch(device.bandwidth, device.units, *pair, demand) for pair in ratios])
        weight = bandwidth / medians
        extra = nnls(more * weight[:, None], 1.0 - weight)
        found.append((round(float(np.sum((weight * (1.0 + more @ extra) - 1.0) ** 2)), 9), demand, extra))
    _, demand, (neighbour, shared, share) = min(found, key=lambda one: one[:2])
    return replace(lane, beside=Contention(demand, float(neighbour), float(shared), float(share)))


def _prefill_beside(lane: LaneModel, records: Sequence[Record], device: DeviceFacts) -> LaneModel:
    """With what the output head takes on top of the layers, by least squares over blocks beside a lane on other units."""
    lane = _beside(lane, records, device, _prefill_rest)
    above = below = 0.0
    for record in (record for record in records if record.units + record.beside <= device.units):
        slower = stretch(device.bandwidth, device.units, record.units, record.beside, lane.beside)
        head_s = slower * lane.at(record.units)[-1] * record.last / record.median_s
        rest = (lane.fixed_s + slower * _prefill_rest(lane, record)) / record.median_s - 1.0
        above -= head_s * rest
        below += head_s * head_s
    return replace(lane, beside=replace(lane.beside, head=max(above / below, 0.0) if below else 0.0))


def conformal_quantile(ratios: Sequence[float], coverage: float = COVERAGE) -> float | None:
    """Split conformal: the next ratio of the same distribution is below it with that probability. None: too few to say.

    The ceil((n + 1) coverage)-th smallest of n; Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World.
    """
    rank = math.ceil((len(ratios) + 1) * coverage)
    return sorted(ratios)[rank - 1] if rank <= len(ratios) else None


def guards_of(residuals: Sequence[tuple[Record, float]]) -> dict[str, tuple[float, ...]]:
    """Quantiles of measured / predicted (given with each record) for each part and size.

    Where a cell has too few, they are the part's, or the cell's own of 95 % if that is more (the highest time of a few is most
    often a stall, of which the part knows how rare it is), then the kind's. Times of the same work are alike, so that they say
    less than their number: the log of a part's quantiles is widened by one over the root of how many kinds of work it has.
    """
    kinds: dict[str, list[float]] = defaultdict(list)
    parts: dict[tuple[Kind, int, int], list[list[float]]] = defaultdict(lambda: [[] for _ in range(len(SIZES_S) + 1)])
    works: dict[tuple[Kind, int, int], set[object]] = defaultdict(set)
    for record, expected_s in residuals:
        ratios = [took_s / expected_s for took_s in record.times_s]
        part = (record.kind, record.units, record.beside)
        kinds[record.kind] += ratios
        parts[part][size_of(expected_s)] += ratios
        works[part].add(_work(record))
    pooled = {kind: _of_kind(kind, kinds[kind]) for kind in ("decode", "prefill", "mixed")}
    guards = {kind: (max(factor, 1.0),) * (len(SIZES_S) + 1) for kind, factor in pooled.items()}
    for part, sizes in parts.items():
        every = conformal_quantile([ratio for ratios in sizes for ratio in ratios]) or pooled[part[0]]
        wider = 1 + len(works[part]) ** -0.5
        guards[part_of(*part)] = tuple(max(_of_cell(ratios, every), 1.0) ** wider for ratios in sizes)
    return guards


def _of_cell(ratios: Sequence[float], every: float) -> float:
    return conformal_quantile(ratios) or max(every, conformal_quantile(ratios, FEW_COVERAGE) or max(ratios, default=0.0))


def _of_kind(kind: str, ratios: Sequence[float]) -> float:
    found = conformal_quantile(ratios)
    if found is None:
        raise TooFewSamplesError(f"{len(ratios)} times of {kind} to calibrate with: a bound of {COVERAGE:.0%} needs 99")
    return found


def qualities(records: Sequence[Record], costs: FittedCosts) -> list[Quality]:
    """Of the held-out records, by part, in the order of their names."""
    parts: Mapping[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.role == "test":
            parts[part_of(record.kind, record.units, record.beside)].append(record)
    return [_quality(part, parts[part], costs) for part in sorted(parts)]


def _quality(part: str, records: Sequence[Record], costs: FittedCosts) -> Quality:
    errors: list[float] = []
    inside = 0
    for record in records:
        expected_s, bound_s = estimate(costs, record)
        errors += [abs(expected_s / took_s - 1) for took_s in record.times_s]
        inside += sum(took_s <= bound_s for took_s in record.times_s)
    return Quality(part, len(records), len(errors), percentile(errors, 50), percentile(errors, 90), inside / len(errors))
