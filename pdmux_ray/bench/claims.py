"""What a comparison of modes must show, and what it shows. Pure but for the sessions that it reads.

A goodput that held at every rate is "at least" that, and a ratio over it "at most"; when both sides held every rate, nothing is
known of their ratio. Of one that held at none only the lowest rate is known, which it is below: a ratio over it is "at least".
It holds for sure only where its interval lies above the limit. A ratio to the best of several is one to the largest of noisy
figures, so it comes out a little low.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pdmux_ray.bench.load.comparison import goodput_ratio
from pdmux_ray.bench.load.session import Session
from pdmux_ray.bench.settings import AUTO, FIXED, PEER
from pdmux_ray.metrics.goodput import Bound
from pdmux_ray.metrics.summary import Summary
from pdmux_ray.report import figures

LONG_IN = "loogle"
OF_BEST = 0.97
TIMES = 2.0


class Verdict(Enum):
    HOLDS = "holds"
    LIKELY = "holds, but no interval shows it"
    OPEN = "not shown"  # the figures allow both
    MISSED = "missed"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Claim:
    """A target over another one, on one shape."""

    shape: str
    over: str
    limit: float
    ratio: float | None
    ci: tuple[float, float | None] | None = None  # 95 %; without an upper end: None
    at_least: bool = False
    at_most: bool = False
    requests: tuple[int, int] | None = None  # that decided the goodput of the target, and of the other
    target: str = AUTO

    @property
    def verdict(self) -> Verdict:
        if self.ratio is None:
            return Verdict.UNKNOWN
        if self.ratio >= self.limit and not self.at_most:
            simulated = self.requests is None  # figures alone, without noise
            return Verdict.HOLDS if (self.ci[0] >= self.limit if self.ci else simulated) else Verdict.LIKELY
        high = self.ratio if self.ci is None else self.ci[1]
        reaches = self.at_least or self.ratio >= self.limit or high is None or high >= self.limit
        return Verdict.OPEN if reaches else Verdict.MISSED

    @property
    def cells(self) -> list[str]:
        found = interval = figures.NONE
        if self.ratio is not None and not (self.at_least and self.at_most):
            found = f"{'at least ' if self.at_least else 'at most ' if self.at_most else ''}{self.ratio:.2f}"
        if self.ci and found != figures.NONE:
            low, high = self.ci
            interval = f"{low:.2f} {'and more' if high is None else f'to {high:.2f}'}"
        counts = "{} and {}".format(*self.requests) if self.requests else figures.NONE
        return [self.shape, f"{self.target} ≥ {self.limit:g} × {self.over}", found, interval, counts, self.verdict.value]


def claims(by_shape: Mapping[str, Mapping[str, Session]]) -> list[Claim]:
    """Of all shapes that were measured: shape -> target -> what was measured of it."""
    return [claim for shape, sessions in by_shape.items() for claim in _of_shape(shape, sessions)]


def _of_shape(shape: str, sessions: Mapping[str, Session]) -> Iterator[Claim]:
    fixed = [sessions[name] for name in FIXED if name in sessions and sessions[name].points()]
    if fixed:
        best = max(fixed, key=lambda session: session.summary().goodput_rps)
        over = f"{best.name}, the best of {len(fixed)} fixed modes"
        yield claim(shape, sessions.get(AUTO), best, OF_BEST, over)
    if shape == LONG_IN:
        for name, words in (("chunked-512", "chunked-512"), (PEER, "the peer")):
            yield claim(shape, sessions.get(AUTO), sessions.get(name), TIMES, words)


def claim(shape: str, auto: Session | None, other: Session | None, limit: float, over: str) -> Claim:
    """`over`: what the other one is called. Without a figure of both, or when neither held a rate, there is no ratio."""
    if auto is None or other is None or not auto.points() or not other.points():
        return Claim(shape, over, limit, None)
    found = claim_of(shape, auto.summary(), other.summary(), limit, over)
    if found.ratio is None:
        return found
    return replace(found, ci=goodput_ratio(auto, other).ci, requests=(deciding(auto), deciding(other)))


def claim_of(shape: str, ours: Summary, theirs: Summary, limit: float, over: str) -> Claim:
    """Of figures alone, without an interval. No ratio when either is unknown, or when neither held a rate."""
    bounds = ours.goodput_bound, theirs.goodput_bound
    if Bound.UNKNOWN.value in bounds or bounds == (Bound.BELOW.value, Bound.BELOW.value):
        return Claim(shape, over, limit, None)
    at_least, at_most = (bound == Bound.AT_LEAST.value for bound in bounds)
    if theirs.goodput_bound == Bound.BELOW.value:
        least = min(run.rate for run in theirs.runs if run.invalid is None) / theirs.devices
        return Claim(shape, over, limit, ours.goodput_rps / least, at_least=True)
    return Claim(shape, over, limit, ours.goodput_rps / theirs.goodput_rps, at_least=at_least, at_most=at_most)


def deciding(session: Session) -> int:
    """Requests at the rates that the goodput lies between: the first that did not hold and the one below it, where there is
    one; the highest where all held."""
    points = sorted(session.points(), key=lambda point: point.rate_rps)
    failed = next((i for i, point in enumerate(points) if point.good_fraction < session.terms.attainment), len(points))
    return sum(len(point.good) for point in points[max(failed - 1, 0) : failed + 1])


def table(found: Sequence[Claim]) -> list[str]:
    """Lines in Markdown."""
    rows = (f"| {' | '.join(one.cells)} |" for one in found)
    return ["| workload | what must hold | ratio | 95 % interval | decided by requests | |", "|---|---|---|---|---|---|", *rows]


def all_hold(found: Sequence[Claim]) -> bool:
    return bool(found) and all(one.verdict is Verdict.HOLDS for one in found)
