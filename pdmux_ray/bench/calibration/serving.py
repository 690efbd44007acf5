"""What each framework adds to the times of its kernels, and how that was found: on rows that are not held out.

How a framework serves (`NEUTRAL`) is by its defaults and is not fitted: vLLM and TensorRT-LLM prefill in pieces beside decodes,
SGLang prefills first. What it adds (`Added`) is fitted, from nothing on, for models without and with experts apart.

`fit` tries values for one number after the other, and trades of one for another, as long as the loss shrinks. A latency's is
e / (e + limit), where e is |log(simulated / measured)|, so that runs that nothing explains do not decide; kinds count by the
root of their number of rows. Each step away from nothing costs `STEP`, so that a number is what it is because rows ask for it.
No factor is below 1: a server adds to its kernels' times, and that the database has some kernels slower than they are is not
the framework's doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import permutations
from statistics import fmean

from pdmux_ray.bench.calibration.engines import NOTHING, Added
from pdmux_ray.bench.calibration.estimates import Estimate, Serving, has_experts, simulated
from pdmux_ray.bench.calibration.rows import Row, UncostedError

NEUTRAL: Mapping[str, Serving] = {
    "vllm": Serving(mixes=True),
    "sglang": Serving(mixes=False),
    "trtllm": Serving(mixes=True),
}
SERVING: Mapping[str, Serving] = {  # what `fit` finds in silicon.csv
    "vllm": Serving(
        mixes=True,
        dense=Added(layer_s=0.0012, passes=1.2),
        experts=Added(memory=0.95, pass_s=0.075, passes=1.1),
    ),
    "sglang": Serving(
        mixes=False,
        dense=Added(memory=0.95, step_s=0.004, short=1, first_s=0.2),
        experts=Added(memory=0.95, reserved=0.5, layer_s=0.0024, pass_s=0.01, passes=1.75, step_s=0.001, first_s=0.1),
    ),
    "trtllm": Serving(
        mixes=True,
        dense=Added(memory=0.95, layer_s=0.0008, pass_s=0.005, short=1, first_s=0.02),
        experts=Added(passes=1.2, accept_s=0.001, first_s=0.1),
    ),
}
TRIED: Mapping[str, Sequence[float]] = {  # from what adds nothing on
    "memory": (0.9, 0.95),
    "reserved": (1.0, 0.5, 0.0),
    "layer_s": (0.0, 0.1e-3, 0.2e-3, 0.4e-3, 0.6e-3, 0.8e-3, 1.2e-3, 1.6e-3, 2.4e-3),
    "pass_s": (0.0, 5e-3, 10e-3, 20e-3, 35e-3, 50e-3, 75e-3, 100e-3),
    "passes": (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0),
    "step_s": (0.0, 0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3),
    "steps": (1.0, 1.05, 1.1, 1.2, 1.35),
    "short": (0, 1),
    "accept_s": (0.0, 1e-3, 2e-3, 4e-3, 8e-3),
    "first_s": (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3),
}
TTFT_LIMIT, TPOT_LIMIT = 0.25, 0.10  # of median errors, held out
STEP = 0.001
ROWS_OF_A_KIND = 12  # that a fit looks at, with up to
MOST_AT_ONCE = 256  # requests: more take long to simulate
TURNS = 8  # at most, of all numbers

Told = Callable[[str], None]
LossOf = Callable[[Added], tuple[Added, float]]
Simulate = Callable[[Row, Mapping[str, Serving]], Estimate]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a fit asks of a row. Both raise UncostedError."""

    simulated: Simulate = simulated
    has_experts: Callable[[Row], bool] = has_experts


ROWS = Asked()


def fit(rows: Iterable[Row], workers: int, told: Told, asked: Asked = ROWS) -> dict[str, Serving]:
    """Of rows that are not held out, whatever it is given."""
    parts = _parts(rows, asked)
    one = partial(_fit, asked=asked)
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            fits = list(pool.map(one, parts, parts.values()))
    else:
        fits = list(map(one, parts, parts.values()))
    found = dict(NEUTRAL)
    for (framework, experts), (added, loss) in zip(parts, fits, strict=True):
        name = f"{framework}, {'with experts' if experts else 'dense'}"
        told(f"{name}, {len(parts[framework, experts])} rows: {added}, loss {loss:.3f}")
        found[framework] = found[framework].adding(experts, added)
    return found


def differences(found: Mapping[str, Serving], standing: Mapping[str, Serving] = SERVING) -> list[str]:
    """A line for each number in which they differ."""
    return [
        f"{name}, {part}: {field.name} {getattr(ours, field.name):g}, not {getattr(theirs, field.name):g}"
        for name in standing
        for part in ("dense", "experts")
        for ours, theirs in [(getattr(found[name], part), getattr(standing[name], part))]
        for field in fields(Added)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]


def _parts(rows: Iterable[Row], asked: Asked) -> dict[tuple[str, bool], list[Row]]:
    """By framework and kind of model: some rows of each kind, those that repeat another's measurement once."""
    kinds: dict[str, dict[tuple[float, ...], Row]] = {}
    for row in rows:
        if not row.held_out and row.concurrency <= MOST_AT_ONCE and row.framework in NEUTRAL:
            measured = (row.prompt, row.output, row.concurrency, row.ttft_s, row.tpot_s)
            kinds.setdefault(row.kind, {}).setdefault(measured, row)
    parts: dict[tuple[str, bool], list[Row]] = {}
    for kind in kinds.values():
        some = list(kind.values())
        some = some[:: -(-len(some) // ROWS_OF_A_KIND)]
        try:
            parts.setdefault((some[0].framework, asked.has_experts(some[0])), []).extend(some)
        except UncostedError:
            continue
    return parts


def _fit(part: tuple[str, bool], rows: Sequence[Row], asked: Asked) -> tuple[Added, float]:
    """Other values of one number, and when none is better, one number a step up and another a step down."""
    loss_of = partial(_loss, part, rows, asked)
    best = loss_of(NOTHING)
    for _ in range(TURNS):
        before = best
        for name, values in TRIED.items():
            for value in values:
                best = _better(best, {name: value}, loss_of)
        if best == before:
            for up, down in permutations(TRIED, 2):
                best = _better(best, _step(best[0], up, 1) | _step(best[0], down, -1), loss_of)
        if best == before:
            break
    return best


def _better(best: tuple[Added, float], change: Mapping[str, float], loss_of: LossOf) -> tuple[Added, float]:
    tried = replace(best[0], **change)
    found = best if tried == best[0] else loss_of(tried)
    return found if found[1] < best[1] - 1e-9 else best


def _step(added: Added, name: str, by: int) -> dict[str, float]:
    """Nothing where there is no further value."""
    values = TRIED[name]
    at = values.index(getattr(added, name)) + by
    return {name: values[at]} if 0 <= at < len(values) else {}


def _loss(part: tuple[str, bool], rows: Sequence[Row], asked: Asked, added: Added) -> tuple[Added, float]:
    """With the best `first_s`, which no step depends on."""
    framework, experts = part
    how = NEUTRAL[framework].adding(experts, replace(added, first_s=0.0))
    found: dict[str, list[tuple[Row, Estimate]]] = {}
    for row in rows:
        try:
            estimate = asked.simulated(row, {framework: how})
        except UncostedError:
            continue
        found.setdefault(row.kind, []).append((row, estimate))
    if not found:
        return added, math.inf
    losses = {first_s: _mean(found, first_s) for first_s in TRIED["first_s"]}
    tried = [replace(added, first_s=first_s) for first_s in losses]
    return min(((each, losses[each.first_s] + STEP * _steps(each)) for each in tried), key=lambda pair: pair[1])


def _steps(added: Added) -> int:
    return sum(values.index(getattr(added, name)) for name, values in TRIED.items())


def _mean(found: Mapping[str, Sequence[tuple[Row, Estimate]]], first_s: float) -> float:
    kinds = [fmean(_error(row, estimate, first_s) for row, estimate in kind) for kind in found.values()]
    return fmean(kinds, [math.sqrt(len(kind)) for kind in found.values()])


def _error(row: Row, estimate: Estimate, first_s: float) -> float:
    ttft = abs(math.log((estimate.ttft_s + first_s) / row.ttft_s))
    tpot = abs(math.log(estimate.tpot_s / row.tpot_s))
    return (ttft / (ttft + TTFT_LIMIT) + tpot / (tpot + TPOT_LIMIT)) / 2
