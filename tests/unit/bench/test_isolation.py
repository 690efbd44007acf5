"""Which gaps of a stream count to the long prompt."""

from __future__ import annotations

from array import array

import pytest

from pdmux_ray.bench.isolation import Gaps, split_gaps, table
from pdmux_ray.metrics.lifeline import Lifeline


def stream(*token_s: float) -> Lifeline:
    return Lifeline(0.0, 0.0, array("d", token_s))


def steady(begin_s: float, count: int, gap_s: float = 0.01) -> list[float]:
    return [begin_s + gap_s * index for index in range(count)]


def test_a_gap_that_reaches_into_the_prefill_counts_to_it() -> None:
    alone, beside = split_gaps([0.0, 1.0, 2.0, 4.0, 5.0, 6.5, 7.5], settled_s=1.0, sent_s=3.0, first_s=5.5)
    assert alone == [1.0]  # not the first, before all ran smoothly
    assert beside == [2.0, 1.0, 1.5]  # and not the last, after the prompt had its first token


def test_tokens_that_come_together_are_no_gap() -> None:
    assert split_gaps([0.0, 1.0, 1.0, 2.0], 0.0, 9.0, 10.0) == ([1.0, 1.0], [])


@pytest.mark.parametrize(("stall_s", "holds"), [(0.029, True), (0.05, False)])
def test_the_largest_gap_beside_the_prompt_is_held_against_the_median_alone(stall_s: float, holds: bool) -> None:
    before = steady(0.0, 50)
    streams = [stream(*before, *steady(before[-1] + stall_s, 200)) for _ in range(4)]
    gaps = Gaps()
    gaps.add(streams, Lifeline(0.5, before[-1] + 0.001, array("d", [1.5])))
    assert gaps.median_s == pytest.approx(0.01)
    assert gaps.largest_s == [pytest.approx(stall_s)]
    assert gaps.holds is holds
    assert ("MISSED" in table({"split": gaps})[-1]) is not holds
    assert "MISSED" not in table({"chunked-512": gaps})[-1]  # whose limits nobody states
