from __future__ import annotations

from dataclasses import replace

import pytest

from pdmux_ray.metrics.goodput import Bound
from pdmux_ray.metrics.summary import Stats, Summary
from pdmux_ray.report.ratios import Comparison, Verdict, compare, shared_rates

from .samples import target


def faster(summary: Summary, factor: float) -> Summary:
    runs = [
        replace(run, ttft_s=Stats(*(getattr(run.ttft_s, name) / factor for name in ("mean", "p50", "p90", "p99", "max"))))
        for run in summary.runs
    ]
    return replace(summary, runs=runs)


def found(comparisons: list[Comparison], measure: str, rate: float | None = None) -> Comparison:
    (one,) = [c for c in comparisons if (c.measure, c.rate) == (measure, rate)]
    return one


def test_a_ratio_is_over_the_first_target_and_says_which_is_better() -> None:
    first = target("A").summary
    comparisons = compare([("A", first), ("B", faster(first, 2))])
    ttft = found(comparisons, "TTFT p99", 4)
    assert (ttft.target, ttft.ratio, ttft.verdict) == ("B", pytest.approx(0.5), Verdict.BETTER)
    assert found(compare([("B", faster(first, 2)), ("A", first)]), "TTFT p50", 2).verdict is Verdict.WORSE
    assert found(comparisons, "ITL p50", 2).verdict is Verdict.EVEN


def test_more_tokens_and_more_good_requests_are_better() -> None:
    first = target("A").summary
    runs = [replace(run, output_tokens_per_s=run.output_tokens_per_s * 2, good_fraction=0.0) for run in first.runs]
    comparisons = compare([("A", first), ("B", replace(first, runs=runs))])
    assert found(comparisons, "output tokens/s", 2).verdict is Verdict.BETTER
    assert found(comparisons, "good requests", 2).verdict is Verdict.WORSE


def test_a_goodput_is_better_only_when_the_intervals_do_not_meet() -> None:
    first = replace(target("A").summary, goodput_rps=4.0, goodput_ci=(3.0, 5.0))
    near, far = (replace(first, goodput_rps=rps, goodput_ci=(rps - 1, rps + 1)) for rps in (5.5, 8.0))
    assert found(compare([("A", first), ("B", near)]), "goodput").verdict is Verdict.UNCLEAR
    assert found(compare([("A", first), ("B", far)]), "goodput").verdict is Verdict.BETTER
    assert found(compare([("B", far), ("A", first)]), "goodput").verdict is Verdict.WORSE


def test_a_lower_bound_is_never_worse_than_anything() -> None:
    measured = replace(target("A").summary, goodput_rps=8.0, goodput_ci=(7.0, 9.0), goodput_bound=Bound.MEASURED.value)
    bound = replace(measured, goodput_rps=4.0, goodput_ci=(4.0, 4.0), goodput_bound=Bound.AT_LEAST.value)
    assert found(compare([("A", measured), ("B", bound)]), "goodput").verdict is Verdict.UNCLEAR
    assert found(compare([("B", bound), ("A", measured)]), "goodput").verdict is Verdict.UNCLEAR
    higher = replace(bound, goodput_rps=20.0, goodput_ci=(20.0, 20.0))
    assert found(compare([("A", measured), ("B", higher)]), "goodput").verdict is Verdict.BETTER


def test_an_unknown_goodput_has_no_ratio() -> None:
    nothing = target("B", rates=(2,), invalid=(2,)).summary
    one = found(compare([("A", target("A").summary), ("B", nothing)]), "goodput")
    assert (one.ratio, one.verdict) == (None, Verdict.UNKNOWN)


def test_invalid_runs_are_not_compared() -> None:
    assert shared_rates([target("A").summary, target("B", invalid=(4,)).summary]) == [2, 8]


def test_of_several_rounds_the_median_counts() -> None:
    first = target("A", rates=(2,)).summary
    rounds = [replace(first.runs[0], output_tokens_per_s=speed) for speed in (100.0, 300.0, 900.0)]
    comparisons = compare([("A", replace(first, runs=rounds[:1])), ("B", replace(first, runs=rounds))])
    assert found(comparisons, "output tokens/s", 2).ratio == pytest.approx(3.0)


def test_one_target_alone_has_no_ratios() -> None:
    assert compare([("A", target("A").summary)]) == []
