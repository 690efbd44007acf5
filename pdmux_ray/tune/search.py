"""The search: which trials are run, in which order, and what stands at the end. Who runs them is somebody else.

    race         every topology in one mode, aggregated ones in all, each kind for itself; then the other modes and routes of
                 the best topologies
    curve        the best candidate of each ratio is searched to its end, for the plot
    confirm      the best ones, and the best of each kind, on requests that nothing was chosen by
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
from pdmux_ray.tune.standing import Standing, best_of, ranked
from pdmux_ray.tune.trial import NO_CHANGES, Changes, Found

STEP = 1.05  # from one rate to the next
RANGE = (0.02, 2.0)  # of the best estimate: the ends of the grid
FIRST = 0.6  # of its estimate, where a candidate is tried while nobody leads
WIDENED = 4  # topologies that are tried in other modes and with other routes
TOP = 3  # that are confirmed, beside the best of each kind
AROUND = (-8, -4, -2, 0, 2, 4)  # places of the grid around the rate that held, where a candidate is confirmed


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
    confirmed: Sequence[Standing]  # best first
    sensitivities: Sequence[Sensitivity]
    runs: int


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
        curve, confirm, sensitivity = 3.0 * len({_ratio(c) for c in order}), len(AROUND) * (TOP + 2.0), 7.0 * changed
        self._later = 12.0 * WIDENED + curve + confirm + sensitivity
        field_.race(order, "topologies")
        self._later = curve + confirm + sensitivity
        field_.race(self._wider(field_), "modes and routes")
        self._later = confirm + sensitivity
        field_.finish(self._best_of_each_ratio(field_), "curve")
        self._later = sensitivity
        standings = ranked(field_.standings())
        confirmed = ranked(self._confirmed(_chosen(standings)))
        self._later = 0.0
        return Outcome(standings, confirmed, self._sensitivities(confirmed, standings), self.runs)

    def start(self, candidate: Candidate) -> int:
        """Where it is tried while nobody leads."""
        return nearest(self.rates, FIRST * self._estimate(candidate.topology))

    def drive(self, race: Race, job_of: Callable[[Probe], Job], note: Callable[[Probe, Found], None], words: str) -> None:
        """The race to its end."""
        under_way = deque[tuple[Probe, Pending]]()
        while True:
            while len(under_way) < self.width and (probe := race.next()) is not None:
                under_way.append((probe, self.submit(job_of(probe))))
            if not under_way:
                return
            probe, pending = under_way.popleft()
            found = pending.result()
            note(probe, found)
            race.note(probe, found.held(self.attainment), found.clear)
            self.runs += 1
            self.tell(self.runs, race.left() + self._later, words)

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

    def _confirmed(self, chosen: Sequence[Standing]) -> list[Standing]:
        under_way = deque[tuple[Candidate, Pending]]()
        jobs = deque(
            Job(standing.candidate, self.rates[index], fresh=True) for standing in chosen for index in self._around(standing)
        )
        found: dict[Candidate, list[Found]] = {standing.candidate: [] for standing in chosen}
        while jobs or under_way:
            while jobs and len(under_way) < self.width:
                job = jobs.popleft()
                under_way.append((job.candidate, self.submit(job)))
            candidate, pending = under_way.popleft()
            found[candidate].append(pending.result())
            self.runs += 1
            self.tell(self.runs, len(jobs) + len(under_way) + self._later, "confirmation")
        return [self.standing(candidate, each, False) for candidate, each in found.items()]

    def _around(self, standing: Standing) -> list[int]:
        """Places of the grid about its goodput."""
        middle = nearest(self.rates, standing.held.point.rate_rps) if standing.held else 0
        return sorted({min(max(middle + step, 0), len(self.rates) - 1) for step in AROUND})

    def _sensitivities(self, confirmed: Sequence[Standing], standings: Sequence[Standing]) -> list[Sensitivity]:
        top = [best.candidate for kind in Kind if (best := best_of(confirmed, kind)) is not None]
        held = {standing.candidate: standing.held for standing in standings}
        found, variants = [], self.variants(top)
        for number, variant in enumerate(variants):
            self._later = 7.0 * (len(variants) - number - 1)
            starts = [nearest(self.rates, before.point.rate_rps) if (before := held[each]) else 0 for each in top]
            field_ = _Field(self, variant.changes)
            field_.race(top, f"{variant.name} {variant.value}", starts)
            found.append(Sensitivity(variant, field_.standings()))
        return found


class _Field:
    """The candidates of one race, and what was found of each."""

    def __init__(self, search: Search, changes: Changes = NO_CHANGES) -> None:
        self._search, self._changes = search, changes
        self._race = Race(len(search.rates))
        self._candidates: list[Candidate] = []
        self._found: list[list[Found]] = []

    def race(self, candidates: Sequence[Candidate], words: str, starts: Sequence[int] | None = None) -> None:
        """With those that are in it already."""
        for number, candidate in enumerate(candidates):
            start = self._search.start(candidate) if starts is None else starts[number]
            self._race.add(start, candidate.topology.kind if starts is None else None)
            self._candidates.append(candidate)
            self._found.append([])
        self._drive(words)

    def finish(self, candidates: Sequence[Candidate], words: str) -> None:
        """Searches these to their end."""
        self._race.search_to_the_end(self._candidates.index(candidate) for candidate in candidates)
        self._drive(words)

    def standings(self) -> list[Standing]:
        """In the order of the candidates."""
        return [
            self._search.standing(candidate, self._found[number], self._race.beaten(number))
            for number, candidate in enumerate(self._candidates)
        ]

    def _drive(self, words: str) -> None:
        def job_of(probe: Probe) -> Job:
            return Job(self._candidates[probe.entry], self._search.rates[probe.index], self._changes)

        def note(probe: Probe, found: Found) -> None:
            self._found[probe.entry].append(found)

        self._search.drive(self._race, job_of, note, words)


def _ratio(candidate: Candidate) -> tuple[int, int]:
    return candidate.topology.tp, candidate.topology.prefill


def _chosen(standings: Sequence[Standing]) -> list[Standing]:
    """The best ones, and the best of each kind."""
    chosen = list(standings[:TOP])
    chosen += [best for kind in Kind if (best := best_of(standings, kind)) is not None and best not in chosen]
    return chosen
