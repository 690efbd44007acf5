"""The runs of targets, as reports look at them: names that differ, runs at one rate together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pdmux_ray.metrics.goodput import Bound, RatePoint, Verdict, fraction_ci
from pdmux_ray.metrics.lifeline import Lifeline
from pdmux_ray.metrics.summary import RunSummary, Summary, rate_point
from pdmux_ray.report import figures
from pdmux_ray.report.marks import SERIES, Line
from pdmux_ray.report.series import UnitsSample

Run = tuple[RunSummary, Sequence[Lifeline]]


@dataclass(frozen=True)
class Rate:
    """The runs of one target at one rate that are all valid, or all invalid. At least one."""

    rps: float
    runs: Sequence[Run]

    @property
    def valid(self) -> bool:
        return self.runs[0][0].invalid is None

    @property
    def requests(self) -> int:
        return sum(run.requests for run, _ in self.runs)

    @property
    def good(self) -> float:
        """Share of all requests."""
        return sum(run.good_fraction * run.requests for run, _ in self.runs) / self.requests

    def missed(self, cause: Verdict) -> float:
        """Share of all requests."""
        return sum(run.verdicts.get(cause.value, 0) for run, _ in self.runs) / self.requests

    @cached_property
    def lifelines(self) -> list[Lifeline]:
        return [lifeline for _, lifelines in self.runs for lifeline in lifelines]


@dataclass(frozen=True)
class TargetRuns:
    """What was measured at one target. `runs`: each with its raw samples, or none of them where only figures are left."""

    name: str
    summary: Summary
    runs: Sequence[Run]
    units: Sequence[UnitsSample] = ()

    @cached_property
    def rates(self) -> list[Rate]:
        """The valid runs, ascending."""
        return self._rates(valid=True)

    @cached_property
    def invalid_rates(self) -> list[Rate]:
        return self._rates(valid=False)

    def _rates(self, valid: bool) -> list[Rate]:
        by_rate: dict[float, list[Run]] = {}
        for run in self.runs:
            if (run[0].invalid is None) == valid:
                by_rate.setdefault(run[0].rate, []).append(run)
        return [Rate(rate, by_rate[rate]) for rate in sorted(by_rate)]

    def ci(self, rate: Rate) -> tuple[float, float] | None:
        """95 % interval of `rate.good`. None without raw samples."""
        points = [rate_point(rate.rps, lifelines, self.summary.slo) for _, lifelines in rate.runs if lifelines]
        verdicts = [good for point in points for good in point.good]  # each run's in its own order, as for the goodput
        return fraction_ci(RatePoint(rate.rps, verdicts)) if verdicts else None

    def ttft_limits_s(self, lifelines: Sequence[Lifeline]) -> tuple[float, float] | None:
        """The SLO for the shortest and for the longest of their prompts."""
        slo, prompts = self.summary.slo, [lifeline.prompt_tokens for lifeline in lifelines] or [0]
        low, high = slo.ttft_limit_s(min(prompts)), slo.ttft_limit_s(max(prompts))
        return None if low is None or high is None else (low, high)

    @property
    def held(self) -> Rate | None:
        """Its highest valid rate at which the attainment held, else the lowest one."""
        held = [rate for rate in self.rates if rate.good >= self.summary.attainment]
        return held[-1] if held else next(iter(self.rates), None)

    @property
    def goodput_known(self) -> bool:
        return self.summary.goodput_bound != Bound.UNKNOWN.value


def with_names(targets: Sequence[TargetRuns]) -> list[TargetRuns]:
    """The same with printable names that differ."""
    counts = Counter(target.name for target in targets)
    seen: Counter[str] = Counter()
    named = []
    for target in targets:
        seen[target.name] += 1
        suffix = f" ({seen[target.name]})" if counts[target.name] > 1 else ""
        named.append(replace(target, name=figures.printable(target.name) + suffix))
    return named


def lines(targets: Sequence[TargetRuns]) -> list[Line]:
    """A colour for each target, the same one in every chart."""
    return [Line(target.name, SERIES[i % len(SERIES)]) for i, target in enumerate(targets)]
