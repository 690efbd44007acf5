"""A latency model of the device in well under a minute: a tenth of the work of `pdmux profile`, nothing held out.

What it predicts with is good enough to serve by, because the engine corrects it step by step; it is no profile to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.engine.runner import LaneRunner
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.sizes import Sizes
from pdmux_ray.latency.correction import CorrectedCosts
from pdmux_ray.latency.design import Point
from pdmux_ray.latency.fit import DeviceFacts, fit
from pdmux_ray.latency.measure import PointBench
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.records import Record
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Split

LEVELS = 3  # splits that are measured; what is between them is interpolated
BLOCK_S = 0.03  # of a prefill's blocks


def quick_costs(lab: Lab, runner: LaneRunner) -> CorrectedCosts:
    """Of the model that the runner has. Raises ConfigError when its pool is too small, TooFewSamplesError."""
    splits, units = some_of(lab.splits), runner.units
    bench = PointBench(runner, lab.clock)
    records: list[Record] = [record for point in points(lab.sizes, splits, units) for record in bench.measure(point)]
    bandwidth = [(split.decode_units, lab.copy_rate(lab.streams.decode(split))) for split in splits]
    highest, rising = 0.0, []
    for level, rate in [*bandwidth, (units, lab.rates.copy_bytes_per_s)]:
        highest = max(highest, rate)
        rising.append((level, highest))
    switch_s = bench.switch_s(splits[-1]) if splits else 0.0
    return CorrectedCosts(FittedCosts(fit(records, DeviceFacts(runner.layers, units, tuple(rising), switch_s))))


def some_of(splits: Sequence[Split]) -> list[Split]:
    """Evenly spaced, with both ends."""
    if len(splits) <= LEVELS:
        return list(splits)
    return [splits[round(i * (len(splits) - 1) / (LEVELS - 1))] for i in range(LEVELS)]


def points(sizes: Sizes, splits: Sequence[Split], units: int) -> list[Point]:
    """Decodes and prefills alone, both at once on disjoint and on shared units, and in one pass."""
    repeats, contexts, batches = sizes.profile_repeats, sizes.profile_contexts, sizes.profile_batches
    short, long, most = contexts[0], contexts[-1], sizes.profile_prompts[-1]
    few, many = batches[0], batches[-1]
    pieces = [Piece(new, prior) for new in sizes.profile_prompts for prior in (0, long)]
    beside = [(few, long, Piece(most // 2, 0)), (many, short, Piece(most // 4, long))]
    disjoint_and_capped = [*splits, *(Split(split.prefill_units, units) for split in splits)]
    return [
        *(
            Point("decode", "fit", split, (context,) * batch, (), repeats)
            for split in [*splits, Split(0, units)]
            for batch in batches
            for context in contexts
        ),
        *(
            Point("prefill", "fit", split, (), (piece,), repeats, BLOCK_S)
            for split in [*splits, Split(units, 0)]
            for piece in pieces
        ),
        *(
            Point("decode", "fit", split, (context,) * batch, (piece,), repeats)
            for split in disjoint_and_capped
            for batch, context, piece in beside
        ),
        *(
            Point(
                "mixed", "fit", None, (short,) * batch, (Piece(min(piece.new_tokens, most // 2), piece.prior_tokens),), repeats
            )
            for batch in batches[1:]
            for piece in pieces
        ),
    ]
