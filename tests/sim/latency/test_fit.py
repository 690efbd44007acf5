"""Bounds from what measured times are of their predictions."""

from __future__ import annotations

import pytest

from pdmux_ray.latency.fit import DeviceFacts, fit, guards_of
from pdmux_ray.latency.model import FittedCosts
from pdmux_ray.latency.records import Record
from pdmux_ray.policy.views import Piece

PREDICTED_S = 0.01  # of the second size


def residuals(ratios: list[float], works: int = 100, expected_s: float = PREDICTED_S) -> list[tuple[Record, float]]:
    """Of passes, decodes and prefills alike: `works` kinds of work with these times each."""
    times_s = tuple(ratio * expected_s for ratio in ratios)
    records = [Record("mixed", "fit", 2, 0, work, work, (Piece(8, 0),), 0, False, times_s) for work in range(works)]
    others = [
        Record(kind, "fit", 2, 0, 1, 32, (Piece(8, 0),) * (kind == "prefill"), 0, False, (expected_s,) * 99)
        for kind in ("decode", "prefill")
    ]
    return [(record, expected_s) for record in (*records, *others)]


def block(tokens: int, layers: int, last: bool, beside: int) -> Record:
    """On one unit a layer takes 0.1 ms and the output head 2 ms; beside another lane 1.2 and 3 times as much."""
    took_s = 1e-4 * layers * tokens * (1.2 if beside else 1.0) + 0.002 * last * (3.0 if beside else 1.0)
    return Record("prefill", "fit", 1, beside, 0, 0, (Piece(tokens, 0),), layers, last, (took_s,) * 9)


def test_the_output_head_suffers_more_from_the_other_lane_than_the_layers_do() -> None:
    blocks = [
        block(tokens, layers, last, beside)
        for tokens in (1, 2, 4, 8)
        for layers, last in ((3, False), (4, False), (9, False), (3, True), (10, True))
        for beside in (0, 1)
    ]
    passes = [record for record, _ in residuals([1.0]) if record.kind == "mixed"]
    decodes = [Record("decode", "fit", 1, beside, 1, n, (), 0, False, (0.01,) * 9) for n in range(12) for beside in (0, 1)]
    parameters = fit([*blocks, *passes, *decodes], DeviceFacts(10, 2, ((1, 1e9), (2, 2e9)), 0.0))
    costs = FittedCosts(parameters)
    with_head_s, without_s = (costs.prefill([Piece(4, 0)], 3, 1, 1, last).predicted_s for last in (True, False))
    assert with_head_s == pytest.approx(3 * 4 * 1.2e-4 + 0.006, rel=0.02)
    assert without_s == pytest.approx(3 * 4 * 1.2e-4, rel=0.02)


def test_a_bound_is_the_quantile_of_its_cell() -> None:
    assert guards_of(residuals([1.0] * 9 + [1.2]))["mixed on 2"][1] == 1.2 ** (1 + 100**-0.5)


def test_a_stall_among_the_few_times_of_a_cell_does_not_make_its_bound() -> None:
    many, few = residuals([1.0, 1.1] * 5, expected_s=0.02), residuals([1.0] * 4, works=10)
    stalled = residuals([1.0, 1.0, 1.0, 3.0], works=1)[:1] + few[1:]
    assert guards_of(many + stalled)["mixed on 2"][1] == guards_of(many + few)["mixed on 2"][1]


def test_few_times_that_lie_higher_than_those_of_other_sizes_make_a_bound_of_their_own() -> None:
    many = residuals([1.0, 1.1] * 5, expected_s=0.02)
    guards = guards_of(many + residuals([1.5] * 4, works=10))["mixed on 2"]
    assert guards[1] > 1.5 > guards[2]
