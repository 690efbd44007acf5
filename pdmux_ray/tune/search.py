"""The search: which trials are run, in which order, and what stands at the end. Who runs them is somebody else.

    race         every topology in one mode, aggregated ones in all, each kind for itself; then the other modes and routes of
                 the best topologies
    curve        the best candidate of each ratio is searched to its end, for the plot
    confirm      the best ones, the best of each kind, and the best that servers can run, on requests that nothing was chosen by
    sensitivity  the best of each kind again, with each assumption halved and doubled

Results are noted in the order in which trials were begun, so equal arguments on as many workers give equal answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdmux_ray.tune.candidates import Candidate, Kind, Space, Topology
from pdmux_ray.tune.estimate import Work
from pdmux_ray.tune.grid import ladder, nearest
from pdmux_ray.tune.race import Probe, Race
from pdmux_ray.tune.standing import Standing, first_of, ranked, winner_of
from pdmux_ray.tune.trial import NO_CHANGES, Changes, Found

STEP = 1.05  # from one rate to the next
RANGE = (0.02, 2.0)  # of the best estimate: the ends of the grid
FIRST = 0.6  # of its estimate, where a candidate is tried while nobody leads
WIDENED = 4  # topologies that are tried in other modes and with other routes
TOP = 3  # that are confirmed, beside the best of each kind
AROUND = (-8, -4, -2, 3)  # places of the grid, from the rate that held: where a candidate is confirmed besides


@dataclass(frozen=True, slots=True)
class Job:
    """One trial. `fresh`: on other requests than those that candidates are chosen by."""

    candidate: Candidate
    rate: float
    changes: Changes = NO_CHANGES
    fresh: bool = False


class Pending(Protocol):
    """A trial under way."""

    def result(self) -> Found: ...


@dataclass(frozen=True, slots=True)
class Done:
    """A trial that was run at once."""

    found: Found

    def result(self) -> Found:
        return self.found


Submit = Callable[[Job], Pending]
Tell = Callable[[int, float, str], None]
"""Called with the runs done, about how many are left, and what is being done."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An assumption at another value."""

    name: str
    value: str  # what it is now
    changes: Changes


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`standings`: of the candidates whose conclusion it is, aligned with them."""

    variant: Variant
    standings: Sequence[Standing]

    @property
    def winner(self) -> Standing:
        return ranked(self.standings)[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    standings: Sequence[Standing]  # of all that were tried, best first
    confirmed: Sequence[Standing]  # some of them on other requests, in the same order: chosen by none of these figures
    sensitivities: Sequence[Sensitivity]
    runs: int

    @property
    def winner(self) -> Standing:
        return winner_of(self.confirmed)


@dataclass(slots=True)
class Search:
    """Owner: the command. `works`: of each TP. `width`: trials that are under way at once."""

    space: Space
    works: Mapping[int, Work]
    submit: Submit
    attainment: float
    width: int
    tell: Tell = lambda done, left, words: None
    variants: Callable[[Sequence[Candidate]], Sequence[Variant]] = lambda candidates: ()
    can_serve: Callable[[Candidate], bool] = lambda candidate: True
    rates: list[float] = field(init=False)
    runs: int = field(default=0, init=False)
    _later: float = field(default=0.0, init=False)  # runs of the phases that follow, about

    def __post_init__(self) -> None:
        best_rps = max(self._estimate(topology) for topology in self.space.topologies())
        self.rates = ladder(RANGE[0] * best_rps, RANGE[1] * best_rps, STEP)

    def run(self) -> Outcome:
        field_ = _Field(self)
        order = sorted(self.space.first(), key=lambda candidate: -self._estimate(candidate.topology))
        changed = len(self.variants(order[:TOP]))
        curve, confirm, sensitivity = 2.0 * len({_ratio(c) for c in order}), 9.0 * (TOP + 1), 7.0 * changed
        topologies = {candidate.topology for candidate in order}
        wider = min(WIDENED, len(topologies)) * max(len(self.space.variants(topology)) for topology in topologies)
        self._later = 1.5 * wider + curve + confirm + sensitivity
        field_.race(order, "topologies")
        self._later = curve + confirm + sensitivity
        field_.race(self._wider(field_), "modes and routes")
        self._later = confirm + sensitivity
        field_.finish(self._best_of_each_ratio(field_), "curve")
        self._later = sensitivity
        standings = ranked(field_.standings())
        chosen = self._chosen(standings)
        self._later += len(AROUND) * len(chosen)
        confirmed = self._confirmed(chosen)
        self._later = 0.0
        return Outcome(standings, confirmed, self._sensitivities(confirmed, standings), self.runs)

    def start(self, candidate: Candidate) -> int:
        """Where it is tried while nobody leads."""
        return nearest(self.rates, FIRST * self._estimate(candidate.topology))

    def drive(
        self,
        next_probe: Callable[[], Probe | None],
        race: Race | None,
        job_of: Callable[[Probe], Job],
        note: Callable[[Probe, Found], None],
        words: str,
        planned: int = 0,
    ) -> None:
        """To the end of the probes; `race` is told of each. `planned`: how many there are, without a race."""
        under_way = deque[tuple[Probe, Pending]]()
        while True:
            while len(under_way) < self.width and (probe := next_probe()) is not None:
                under_way.append((probe, self.submit(job_of(probe))))
            if not under_way:
                return
            probe, pending = under_way.popleft()
            found = pending.result()
            note(probe, found)
            self.runs += 1
            planned -= 1
            if race is not None:
                race.note(probe, found.held(self.attainment), found.clearly_failed(self.attainment))
            self.tell(self.runs, (race.left() if race else planned) + self._later, words)

    def standing(self, candidate: Candidate, found: Iterable[Found], beaten: bool) -> Standing:
        ordered = sorted(found, key=lambda each: each.point.rate_rps)
        return Standing(candidate, ordered, self.attainment, self.space.gpus, beaten)

    def _estimate(self, topology: Topology) -> float:
        return self.works[topology.tp].most_rps(topology)

    def _wider(self, field_: _Field) -> list[Candidate]:
        """Other modes and routes of the topologies that came out best, of either kind."""
        standings = ranked(field_.standings())
        best = [each.candidate.topology for each in standings if each.candidate.topology.kind is Kind.MIXED][:WIDENED]
        best += [each.candidate.topology for each in standings if each.candidate.topology.kind is Kind.DISAGGREGATED][:1]
        return [candidate for topology in best for candidate in self.space.variants(topology)]

    def _best_of_each_ratio(self, field_: _Field) -> list[Candidate]:
        found: dict[tuple[int, int], Candidate] = {}
        for standing in ranked(field_.standings()):
            found.setdefault(_ratio(standing.candidate), standing.candidate)
        return list(found.values())

    def _chosen(self, standings: Sequence[Standing]) -> list[Standing]:
        """The best ones, the best of each kind, and the best that servers can run, best first."""
        best_of_each = [first_of(standings, kind) for kind in Kind]
        served = next((each for each in standings if self.can_serve(each.candidate)), None)
        chosen = {each.candidate for each in (*standings[:TOP], *best_of_each, served) if each is not None}
        return [each for each in standings if each.candidate in chosen]

    def _confirmed(self, chosen: Sequence[Standing]) -> list[Standing]:
        """On fresh requests each is searched to its end, and then tried around that, for the interval."""
        field_ = _Field(self, fresh=True)
        candidates = [standing.candidate for standing in chosen]
        field_.race(candidates, "confirmation", [self._place(standing) for standing in chosen], to_the_end=True)
        self._later -= len(AROUND) * len(chosen)
        field_.try_around(AROUND, "confirmation")
        return field_.standings()

    def _place(self, standing: Standing) -> int:
        """Of the rate that held."""
        return nearest(self.rates, standing.held.point.rate_rps) if standing.held else 0

    def _sensitivities(self, confirmed: Sequence[Standing], standings: Sequence[Standing]) -> list[Sensitivity]:
        top = [best.candidate for kind in Kind if (best := first_of(confirmed, kind)) is not None]
        starts = [self._place(next(each for each in standings if each.candidate == candidate)) for candidate in top]
        found, variants = [], self.variants(top)
        for number, variant in enumerate(variants):
            self._later = 7.0 * (len(variants) - number - 1)
            field_ = _Field(self, variant.changes)
            field_.race(top, f"{variant.name} {variant.value}", starts)
            found.append(Sensitivity(variant, field_.standings()))
        return found


class _Field:
    """The candidates of one race, and what was found of each, by the place of the rate."""

    def __init__(self, search: Search, changes: Changes = NO_CHANGES, fresh: bool = False) -> None:
        self._search, self._changes, self._fresh = search, changes, fresh
        self._race = Race(len(search.rates))
        self._candidates: list[Candidate] = []
        self._found: list[dict[int, Found]] = []

    def race(
        self, candidates: Sequence[Candidate], words: str, starts: Sequence[int] | None = None, to_the_end: bool = False
    ) -> None:
        """With those that are in it already; without `starts` each kind for itself. `to_the_end`: whoever leads."""
        for number, candidate in enumerate(candidates):
            start = self._search.start(candidate) if starts is None else starts[number]
            entry = self._race.add(start, candidate.topology.kind if starts is None else None)
            self._candidates.append(candidate)
            self._found.append({})
            if to_the_end:
                self._race.search_to_the_end([entry])
        self._search.drive(self._race.next, self._race, self._job_of, self._note, words)

    def finish(self, candidates: Sequence[Candidate], words: str) -> None:
        """Searches these to their end."""
        self._race.search_to_the_end(self._candidates.index(candidate) for candidate in candidates)
        self._search.drive(self._race.next, self._race, self._job_of, self._note, words)

    def try_around(self, steps: Sequence[int], words: str) -> None:
        """At these places of the grid, counted from the highest that each has held."""
        places = [(number, (self._race.held(number) or 0) + step) for number in range(len(self._candidates)) for step in steps]
        last = len(self._search.rates) - 1
        new = [Probe(n, at) for n, at in places if 0 <= at <= last and at not in self._found[n]]
        probes = iter(new)
        self._search.drive(lambda: next(probes, None), None, self._job_of, self._note, words, len(new))

    def standings(self) -> list[Standing]:
        """In the order of the candidates."""
        return [
            self._search.standing(candidate, self._found[number].values(), self._race.beaten(number))
            for number, candidate in enumerate(self._candidates)
        ]

    def _job_of(self, probe: Probe) -> Job:
        return Job(self._candidates[probe.entry], self._search.rates[probe.index], self._changes, self._fresh)

    def _note(self, probe: Probe, found: Found) -> None:
        self._found[probe.entry][probe.index] = found


def _ratio(candidate: Candidate) -> tuple[int, int]:
    return candidate.topology.tp, candidate.topology.prefill
