"""Bounds from what measured times are of their predictions."""

from __future__ import annotations

from pdmux_ray.latency.fit import guards_of
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
