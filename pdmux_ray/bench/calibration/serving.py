"""What each framework adds to the times of its kernels, and how that was found: on rows that are not held out.

`fit` tries values for one number after the other, as long as the errors shrink. A row's error is |log(simulated / measured)| of
TTFT and of TPOT, each no more than `MOST`, so that runs that nothing explains do not decide; kinds count by the root of their
number of rows. No factor is below 1: a server adds to its kernels' times, and that the database has some kernels slower than
they are is not the framework's doing. (With 0.8, which a first fit found, what is held out was off by more.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean

from pdmux_ray.bench.calibration.estimates import Estimate, Serving, simulated
from pdmux_ray.bench.calibration.rows import Row, UncostedError

SERVING: Mapping[str, Serving] = {  # what `fit` finds in silicon.csv
    "vllm": Serving(
        mixes=True,
        reserved=0.5,
        memory=0.95,
        adds=True,
        layer_s=0.4e-3,
        moe_layer_s=0.4e-3,
        passes=1.0,
        steps=1.0,
        moe_steps=1.0,
        first_s=0.02,
    ),
    "sglang": Serving(
        mixes=False,
        reserved=0.5,
        memory=0.9,
        adds=True,
        layer_s=1.2e-3,  # no row tells: half of one with experts, as with TensorRT-LLM
        moe_layer_s=2.4e-3,
        passes=1.0,
        steps=1.0,
        moe_steps=1.1,
        first_s=0.03,
    ),
    "trtllm": Serving(
        mixes=True,
        reserved=1.0,
        memory=0.85,
        adds=False,
        layer_s=1.2e-3,
        moe_layer_s=2.4e-3,
        passes=1.1,
        steps=1.2,
        moe_steps=1.0,
        first_s=0.03,
    ),
}
TRIED: Mapping[str, Sequence[float]] = {
    "adds": (False, True),
    "memory": (0.85, 0.9, 0.95),
    "reserved": (0.5, 1.0),
    "layer_s": (0.0, 0.1e-3, 0.2e-3, 0.4e-3, 0.8e-3, 1.2e-3),
    "moe_layer_s": (0.0, 0.2e-3, 0.4e-3, 0.8e-3, 1.2e-3, 1.6e-3, 2.4e-3, 3.2e-3),
    "passes": (1.0, 1.1, 1.2, 1.35, 1.5, 1.75),
    "steps": (1.0, 1.1, 1.2, 1.35),
    "moe_steps": (1.0, 1.1, 1.2, 1.35),
    "first_s": (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2),
}
MOST = 0.7
ROWS_OF_A_KIND = 20  # that a fit looks at, with up to
MOST_AT_ONCE = 256  # requests: more take long to simulate
TURNS = 2  # at most, of all numbers

Told = Callable[[str], None]


def fit(rows: Sequence[Row], workers: int, told: Told) -> dict[str, Serving]:
    """Of rows that are not held out, whatever it is given."""
    some = [row for kind in _kinds(rows).values() for row in kind[:: -(-len(kind) // ROWS_OF_A_KIND)]]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(partial(_fit, some), SERVING)
        return {name: _told(name, how, loss, told) for name, (how, loss) in zip(SERVING, found, strict=True)}


def _told(name: str, how: Serving, loss: float, told: Told) -> Serving:
    told(f"{name}: {how}, mean error {loss:.3f}")
    return how


def _kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if not row.held_out and row.concurrency <= MOST_AT_ONCE:
            found.setdefault(row.kind, []).append(row)
    return found


def _fit(rows: Sequence[Row], framework: str) -> tuple[Serving, float]:
    mine = [row for row in rows if row.framework == framework]
    best = SERVING[framework]
    least = _loss(mine, best)
    for _ in range(TURNS):
        before = least
        for name, values in TRIED.items():
            for value in values:
                how = replace(best, **{name: value})  # type: ignore[arg-type]
                loss = least if how == best else _loss(mine, how)
                if loss < least:
                    best, least = how, loss
        if least == before:
            break
    return best, least


def _loss(rows: Sequence[Row], how: Serving) -> float:
    errors: dict[str, list[float]] = {}
    for row in rows:
        try:
            error = _error(row, simulated(row, {row.framework: how}))
        except UncostedError:
            continue
        errors.setdefault(row.kind, []).append(error)
    if not errors:
        return math.inf
    return fmean([fmean(kind) for kind in errors.values()], [math.sqrt(len(kind)) for kind in errors.values()])


def _error(row: Row, estimate: Estimate) -> float:
    pairs = ((estimate.ttft_s, row.ttft_s), (estimate.tpot_s, row.tpot_s))
    return sum(min(abs(math.log(ours / theirs)), MOST) for ours, theirs in pairs) / 2
