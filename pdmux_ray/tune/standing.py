"""Where a candidate stands: its goodput, how sure that is, what binds it, and what follows from all of them together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
        """Of a run that held but for its growing queue no request counts as good: for longer that is what would come."""
        return [
            replace(found.point, good=[False] * len(found.point.good))
            if found.falls_behind and found.good_enough(self.attainment)
            else found.point
            for found in self.found
        ]

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
        """What most requests missed for at the first rate that did not hold; where all were in time yet, what they queued
        for."""
        if self.failed is None:
            return None
        causes = self.failed.causes
        return max(causes, key=lambda cause: causes[cause], default=Binds.PREFILL)

    @property
    def merit(self) -> tuple[float, float]:
        """More is better: what it holds; for those who hold nothing, how far they are from it."""
        if self.held is None:
            return 0.0, self.points[0].rate_rps * self.points[0].good_fraction
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
    """Both sides draw the same requests, at every rate, where they had as many."""
    least_rps = min(point.rate_rps for point in theirs.points)
    mine, its = (resampled(each.points, each.attainment) for each in (ours, theirs))
    drawn = sorted(_over(one, other, least_rps) for one, other in zip(mine, its, strict=True))
    found = _over(ours.goodput.rps, theirs.goodput.rps, least_rps / theirs.gpus)
    return Ratio(found, (quantile(drawn, 0.025), quantile(drawn, 0.975)), theirs.goodput.bound is Bound.BELOW)


def _over(one: float, other: float, least: float) -> float:
    """`least`: the lowest rate of the other one, which carries less than that where it is 0. Two that carry 0 are equal."""
    return 1.0 if one == other else one / (other or least)


def ranked(standings: Iterable[Standing]) -> list[Standing]:
    """Best first."""
    return sorted(standings, key=lambda standing: standing.merit, reverse=True)


def first_of(standings: Iterable[Standing], *kinds: Kind) -> Standing | None:
    return next((each for each in standings if each.candidate.topology.kind in kinds), None)


PURE = (Kind.AGGREGATED, Kind.DISAGGREGATED)


def winner_of(confirmed: Sequence[Standing]) -> Standing:
    """The first that holds any rate, unless another one is surely better. None is taken for being a little ahead here: the best
    of several looks better than it is."""
    first = next((each for each in confirmed if each.held is not None), confirmed[0])
    surely = [each for each in confirmed if each is not first and ratio(each, first).sure]
    return ranked(surely)[0] if surely and first.held is not None else first


def conclusion(confirmed: Sequence[Standing]) -> list[str]:
    """Sentences. `confirmed`: the best ones and the best of each kind, on other requests than those by which they are in this
    order, best first."""
    winner = winner_of(confirmed)
    others = [each for each in confirmed if each is not winner]
    lines = [_first_line(winner, others)]
    if winner.held is not None:
        lines += [*_next_line(winner, others[:1]), *_order_line(winner, confirmed, ranked(confirmed)[0])]
        lines += _mixed_line(first_of(confirmed, Kind.MIXED), first_of(ranked(confirmed), *PURE))
    if winner.binds is not None:
        lines.append(f"What keeps {winner.candidate.topology} from carrying more: {winner.binds.value}.")
    if winner.failed is not None and winner.failed.good_enough(winner.attainment):
        lines.append(
            f"At {winner.upper_rps:.3g} requests/s per GPU enough requests were good, but its queue was growing: for longer "
            "they would not have been, so that this rate does not count."
        )
    return lines


def _first_line(winner: Standing, others: Sequence[Standing]) -> str:
    if winner.held is None:
        return (
            "No candidate holds any rate that was tried: the objectives cannot be kept on this hardware, or not with this load."
        )
    goodput_text = f"{winner.goodput.rps:.3g} requests/s per GPU"
    if winner.candidate.topology.kind is not Kind.AGGREGATED:
        return f"Take {winner.candidate}: {goodput_text}."
    split = [each for each in others if each.candidate.topology.prefill]
    most = all(each.merit <= winner.merit for each in split)
    words = ", and nothing with prefill instances has more" if split and most else ""
    return f"Stay aggregated: {winner.candidate} has {goodput_text}{words}."


def _next_line(winner: Standing, following: Sequence[Standing]) -> list[str]:
    lines = []
    for second in following:
        found = ratio(winner, second)
        words = "surely better than" if found.sure else "surely worse than" if found.ci[1] < 1 else "not surely better than"
        lines.append(f"It is {words} the next one, {second.candidate}: {found}.")
    return lines


def _mixed_line(mixed: Standing | None, pure: Standing | None) -> list[str]:
    """`pure`: the one with most on these requests, so that a mix is not flattered by a choice that turned out badly."""
    if mixed is None or pure is None:
        return []
    return [
        f"The best mixed topology ({mixed.candidate}) over the pure one that has most ({pure.candidate}): {ratio(mixed, pure)}."
    ]


def _order_line(winner: Standing, confirmed: Sequence[Standing], best: Standing) -> list[str]:
    """Where the requests that confirm speak for another one than those that chose."""
    if winner is not confirmed[0] and confirmed[0].held is not None:
        chosen = confirmed[0]
        return [f"{chosen.candidate} was chosen on other requests; on these it is surely worse: {ratio(chosen, winner)}."]
    if best is winner or best.merit == winner.merit:
        return []
    return [
        f"It was chosen on other requests; on these {best.candidate} has more, {best.goodput.rps:.3g} requests/s per GPU: "
        f"{ratio(best, winner)}."
    ]
