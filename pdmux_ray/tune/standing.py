"""Where a candidate stands: its goodput, how sure that is, what binds it, and what follows from all of them together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdmux_ray.metrics.goodput import Bound, Goodput, RatePoint, goodput, resampled
from pdmux_ray.metrics.lifeline import quantile
from pdmux_ray.tune.binding import Binds
from pdmux_ray.tune.candidates import Candidate, Kind
from pdmux_ray.tune.trial import Found


@dataclass(frozen=True)
class Standing:
    """`found`: at least one, by ascending rate."""

    candidate: Candidate
    found: Sequence[Found]
    attainment: float
    gpus: int
    beaten: bool  # left as soon as another one was surely better: its goodput is below what it failed at

    @property
    def points(self) -> list[RatePoint]:
        return [found.point for found in self.found]

    @cached_property
    def goodput(self) -> Goodput:
        """Requests a second and GPU."""
        whole = goodput(self.points, self.attainment)
        return Goodput(whole.rps / self.gpus, (whole.ci[0] / self.gpus, whole.ci[1] / self.gpus), whole.bound)

    @property
    def failed(self) -> Found | None:
        """The first rate that did not hold."""
        return next((found for found in self.found if not found.held(self.attainment)), None)

    @property
    def held(self) -> Found | None:
        """The last rate that did, below that."""
        held = None
        for found in self.found:
            if not found.held(self.attainment):
                break
            held = found
        return held

    @property
    def upper_rps(self) -> float:
        """Requests a second and GPU that it does not carry; infinite when it held all."""
        return math.inf if self.failed is None else self.failed.point.rate_rps / self.gpus

    @property
    def binds(self) -> Binds | None:
        """What most requests missed for at the first rate that did not hold."""
        if self.failed is None:
            return None
        causes = self.failed.causes
        return max(causes, key=lambda cause: causes[cause], default=None)

    @property
    def merit(self) -> tuple[float, float]:
        """More is better: what it holds; for those who hold nothing, how far they are from it."""
        first = self.found[0].point
        if self.held is None:
            return 0.0, first.rate_rps * first.good_fraction
        return goodput(self.points, self.attainment, resamples=1).rps / self.gpus, 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two goodputs; `ci`: 95 %, of a paired bootstrap."""

    ratio: float
    ci: tuple[float, float]
    at_least: bool  # the other one did not even hold its lowest rate

    @property
    def sure(self) -> bool:
        """More than 1, beyond chance."""
        return self.ci[0] > 1

    def __str__(self) -> str:
        return f"{'at least ' if self.at_least else ''}{self.ratio:.2f}×, 95 % interval {self.ci[0]:.2f} to {self.ci[1]:.2f}"


def ratio(ours: Standing, theirs: Standing) -> Ratio:
    """Both sides draw the same requests where they had the same."""
    least_rps = min(point.rate_rps for point in theirs.points)
    mine, its = (resampled(each.points, each.attainment) for each in (ours, theirs))
    drawn = sorted(one / (other or least_rps) for one, other in zip(mine, its, strict=True))
    below = theirs.goodput.bound is Bound.BELOW
    other_rps = least_rps / theirs.gpus if below else theirs.goodput.rps
    return Ratio(ours.goodput.rps / other_rps, (quantile(drawn, 0.025), quantile(drawn, 0.975)), below)


def ranked(standings: Iterable[Standing]) -> list[Standing]:
    """Best first."""
    return sorted(standings, key=lambda standing: standing.merit, reverse=True)


def best_of(standings: Iterable[Standing], *kinds: Kind) -> Standing | None:
    return next(iter(ranked(each for each in standings if each.candidate.topology.kind in kinds)), None)


PURE = (Kind.AGGREGATED, Kind.DISAGGREGATED)


def conclusion(confirmed: Sequence[Standing]) -> list[str]:
    """Sentences. `confirmed`: the best ones and the best of each kind, on the same requests."""
    winner, *others = ranked(confirmed)
    lines = [_first_line(winner), *([_second_line(winner, others[0])] if others else [])]
    mixed, pure = best_of(confirmed, Kind.MIXED), best_of(confirmed, *PURE)
    if mixed is not None and pure is not None:
        lines.append(
            f"The best mixed topology ({mixed.candidate}) over the best pure one ({pure.candidate}): {ratio(mixed, pure)}."
        )
    if winner.binds is not None:
        lines.append(f"What keeps {winner.candidate.topology} from carrying more: {winner.binds.value}.")
    if winner.held is not None and winner.held.falls_behind:
        lines.append("At the highest rate that held its queue was growing: for longer that rate would be too high.")
    return lines


def _first_line(winner: Standing) -> str:
    if winner.held is None:
        return (
            "No candidate holds any rate that was tried: the objectives cannot be kept on this hardware, or not with this load."
        )
    goodput_text = f"{winner.goodput.rps:.3g} requests/s per GPU"
    if winner.candidate.topology.kind is Kind.AGGREGATED:
        return f"Stay aggregated: {winner.candidate} has {goodput_text}, and nothing with prefill instances has more."
    return f"Take {winner.candidate}: {goodput_text}."


def _second_line(winner: Standing, second: Standing) -> str:
    found = ratio(winner, second)
    words = "surely better than" if found.sure else "not surely better than"
    return f"It is {words} the next one, {second.candidate}: {found}."
