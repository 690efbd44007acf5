"""How targets differ: figure over figure of the first one, at the rates that both were offered. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from pdmux_ray.metrics.goodput import Bound
from pdmux_ray.metrics.summary import RunSummary, Summary
from pdmux_ray.report import figures

EVEN = 0.01  # a ratio nearer to 1 than this is no difference


class Verdict(Enum):
    BETTER = "better"
    WORSE = "worse"
    EVEN = "even"
    UNCLEAR = "unclear"  # the intervals of the two meet, or too low rates were offered to know
    UNKNOWN = "unknown"  # one of them has no figure


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of one target against the baseline. `ratio` is value / baseline; None where one of them is missing or 0."""

    measure: str
    target: str
    rate: float | None  # requests a second; None: over all rates
    value: float | None
    baseline: float | None
    ratio: float | None
    verdict: Verdict
    text: str  # the value, with its unit
    baseline_text: str


@dataclass(frozen=True, slots=True)
class _Measure:
    name: str
    of: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    more_is_better: bool = False


def _milliseconds(seconds: float) -> str:
    return f"{figures.ms(seconds)} ms"


MEASURES: Sequence[_Measure] = (
    _Measure("good requests", lambda run: run.good_fraction, figures.percent, more_is_better=True),
    _Measure("TTFT p50", lambda run: run.ttft_s.p50, _milliseconds),
    _Measure("TTFT p99", lambda run: run.ttft_s.p99, _milliseconds),
    _Measure("ITL p50", lambda run: run.itl_s.p50, _milliseconds),
    _Measure("ITL p99", lambda run: run.itl_s.p99, _milliseconds),
    _Measure("TPOT p50", lambda run: run.tpot_s.p50, _milliseconds),
    _Measure("TPOT p99", lambda run: run.tpot_s.p99, _milliseconds),
    _Measure("output tokens/s", lambda run: run.output_tokens_per_s, figures.significant, more_is_better=True),
)


def shared_rates(summaries: Sequence[Summary]) -> list[float]:
    """Rates at which every target has a valid run, ascending."""
    rates = [{run.rate for run in summary.runs if run.invalid is None} for summary in summaries]
    return sorted(set.intersection(*rates)) if rates else []


def compare(targets: Sequence[tuple[str, Summary]]) -> list[Comparison]:
    """Goodput first, then each measure at each shared rate, for every target but the first, which is the baseline.
    Where a rate was offered several times, the median over its valid runs counts."""
    if len(targets) < 2:
        return []
    (_, first), *others = targets
    found = [_goodput(name, summary, first) for name, summary in others]
    for rate in shared_rates([summary for _, summary in targets]):
        for measure in MEASURES:
            found += [
                _compared(measure, name, rate, _median(summary, rate, measure), _median(first, rate, measure))
                for name, summary in others
            ]
    return found


def _goodput(name: str, summary: Summary, first: Summary) -> Comparison:
    """Better or worse only where the 95 % intervals do not meet, and the lower of the two is no mere lower bound."""
    known = Bound.UNKNOWN.value not in (summary.goodput_bound, first.goodput_bound)
    ratio = summary.goodput_rps / first.goodput_rps if known and first.goodput_rps else None
    verdict = Verdict.UNCLEAR if known else Verdict.UNKNOWN
    if known and _under(first, summary):
        verdict = Verdict.BETTER
    elif known and _under(summary, first):
        verdict = Verdict.WORSE
    text, baseline_text = (f"{figures.goodput(s)} {figures.goodput_unit(s)}".strip() for s in (summary, first))
    return Comparison("goodput", name, None, summary.goodput_rps, first.goodput_rps, ratio, verdict, text, baseline_text)


def _under(low: Summary, high: Summary) -> bool:
    return low.goodput_bound != Bound.AT_LEAST.value and low.goodput_ci[1] < high.goodput_ci[0]


def _median(summary: Summary, rate: float, measure: _Measure) -> float | None:
    runs = [run for run in summary.runs if run.rate == rate and run.invalid is None]
    values = [value for run in runs if (value := measure.of(run)) is not None]
    return statistics.median(values) if values else None


def _compared(measure: _Measure, name: str, rate: float, value: float | None, baseline: float | None) -> Comparison:
    ratio = value / baseline if value is not None and baseline else None
    verdict = Verdict.UNKNOWN
    if value is not None and baseline is not None:
        even = abs(value - baseline) <= EVEN * abs(baseline)
        better = (value > baseline) == measure.more_is_better
        verdict = Verdict.EVEN if even else Verdict.BETTER if better else Verdict.WORSE
    text, baseline_text = (figures.NONE if v is None else measure.text(v) for v in (value, baseline))
    return Comparison(measure.name, name, rate, value, baseline, ratio, verdict, text, baseline_text)


def rows(comparisons: Sequence[Comparison], targets: int) -> list[Sequence[Comparison]]:
    """One row per measure and rate, with a comparison for each of the `targets` other than the baseline."""
    return [comparisons[i : i + targets] for i in range(0, len(comparisons), targets)]


def ratio_text(found: Comparison) -> str:
    return figures.NONE if found.ratio is None else f"{found.ratio:.2f}×"
