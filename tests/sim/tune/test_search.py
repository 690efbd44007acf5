"""The search over trials whose answers are given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.metrics.goodput import RatePoint
from pdmux_ray.tune.candidates import PREDICT, Candidate, Kind, Space, Topology
from pdmux_ray.tune.estimate import Work
from pdmux_ray.tune.fake_trials import FakeTrials
from pdmux_ray.tune.search import STEP, TOP, Done, Job, Outcome, Search, Variant
from pdmux_ray.tune.standing import conclusion
from pdmux_ray.tune.trial import NO_CHANGES, Changes
from pdmux_ray.types import Mode
from tests.examples import tried

SPACE = Space(4, (1, 2), (Mode.AUTO, Mode.CHUNKED), (512,))
WORKS = {tp: Work(1.0, 1.0) for tp in SPACE.tps}
HALVED = Changes(assume=(("link", 0.5),))


def capacities(seed: int) -> FakeTrials:
    """Of every candidate any from 0.1 to 3 requests a second."""
    return FakeTrials(lambda candidate, changes: 0.1 + 2.9 * Random(f"{seed} {candidate}").random())


def searched(trials: FakeTrials, width: int = 1, variants: tuple[Variant, ...] = ()) -> Outcome:
    return Search(SPACE, WORKS, trials.submit, trials.attainment, width, variants=lambda candidates: variants).run()


@settings(max_examples=tried(10), deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4))
def test_of_all_that_was_tried_the_one_that_carries_most_is_first_or_as_good(seed: int, width: int) -> None:
    trials = capacities(seed)
    outcome = searched(trials, width)
    most = {standing.candidate: trials.capacity(standing.candidate, NO_CHANGES) for standing in outcome.standings}
    assert most[outcome.confirmed[0].candidate] >= max(most.values()) / STEP**3
    assert set(SPACE.first()) <= set(most)


@settings(max_examples=tried(10), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_its_goodput_is_about_what_it_carries(seed: int) -> None:
    trials = capacities(seed)
    winner = searched(trials).confirmed[0]
    carried = trials.capacity(winner.candidate, NO_CHANGES)
    assert carried / STEP**2 < winner.goodput.rps * SPACE.gpus < carried * STEP**2
    assert winner.goodput.ci[0] <= winner.goodput.rps <= winner.goodput.ci[1]


def test_most_candidates_cost_one_or_two_runs_before_the_curve() -> None:
    trials = capacities(5)
    searched(trials)
    runs = Counter(job.candidate for job in trials.jobs if not job.fresh)
    few = [candidate for candidate, count in runs.items() if count <= 2]
    assert len(few) > len(runs) / 2


def test_a_rate_at_which_queues_grow_wins_no_race() -> None:
    """All requests are good whatever is offered, of runs so short; only the queues tell who carries it."""
    trials = capacities(7)

    def submit(job: Job) -> Done:
        found = trials.judge(job)
        grows = job.rate > trials.capacity(job.candidate, NO_CHANGES)
        return Done(replace(found, point=RatePoint(job.rate, [True] * 1000), clear=True, falls_behind=grows))

    outcome = Search(SPACE, WORKS, submit, 0.9, 1).run()
    most = {standing.candidate: trials.capacity(standing.candidate, NO_CHANGES) for standing in outcome.standings}
    assert most[outcome.winner.candidate] >= max(most.values()) / STEP
    assert outcome.winner.goodput.rps * SPACE.gpus <= 1.01 * max(most.values())


def test_the_winner_is_chosen_on_other_requests_than_those_of_its_figure() -> None:
    """On those that confirm everybody carries as much."""
    chosen = FakeTrials(lambda candidate, changes: 2.0 if candidate.topology.kind is Kind.MIXED else 1.0)
    fresh = FakeTrials(lambda candidate, changes: 1.0)
    outcome = Search(SPACE, WORKS, lambda job: (fresh if job.fresh else chosen).submit(job), 0.9, 1).run()
    assert outcome.winner.candidate.topology.kind is Kind.MIXED
    assert outcome.winner.goodput.rps * SPACE.gpus < 1.3


def test_the_best_that_servers_can_run_is_confirmed_too() -> None:
    only = Candidate(Topology(1, 3, 0, 1), Mode.AUTO, PREDICT)
    trials = FakeTrials(lambda candidate, changes: 0.5 if candidate == only else 2.0)
    outcome = Search(SPACE, WORKS, trials.submit, 0.9, 1, can_serve=lambda candidate: candidate == only).run()
    assert only in {standing.candidate for standing in outcome.confirmed}


def test_no_trial_is_run_twice() -> None:
    trials = capacities(3)
    searched(trials, variants=(Variant("link", "0.5", HALVED),))
    assert max(Counter(trials.jobs).values()) == 1


def test_what_is_told_of_the_best_is_of_requests_that_nothing_was_chosen_by() -> None:
    trials = capacities(4)
    outcome = searched(trials)
    fresh = {job.candidate for job in trials.jobs if job.fresh}
    assert {standing.candidate for standing in outcome.confirmed} == fresh
    assert {standing.candidate.topology.kind for standing in outcome.confirmed} == set(Kind)
    assert len(outcome.confirmed) <= TOP + len(Kind)


def test_equal_arguments_give_equal_answers_also_with_several_at_once() -> None:
    first, again = (searched(capacities(5), width=3) for _ in range(2))
    assert [standing.candidate for standing in first.standings] == [standing.candidate for standing in again.standings]
    assert first.runs == again.runs


def test_the_best_topology_is_tried_in_every_mode_and_with_every_route() -> None:
    def capacity(candidate: Candidate, changes: Changes) -> float:
        if candidate.topology != Topology(1, 1, 3, 0):
            return 1.0
        return 3.0 if candidate.mode is Mode.CHUNKED else 1.5

    trials = FakeTrials(capacity)
    best = searched(trials).confirmed[0].candidate
    assert best == Candidate(best.topology, Mode.CHUNKED, PREDICT)


def test_a_changed_assumption_that_changes_the_winner_is_seen() -> None:
    def capacity(candidate: Candidate, changes: Changes) -> float:
        mixed = candidate.topology.kind is Kind.MIXED
        return (0.5 if changes == HALVED else 2.0) if mixed else 1.0

    outcome = searched(FakeTrials(capacity), variants=(Variant("link", "0.5", HALVED),))
    assert outcome.confirmed[0].candidate.topology.kind is Kind.MIXED
    assert outcome.sensitivities[0].winner.candidate.topology.kind is not Kind.MIXED


def test_it_says_how_far_it_is_and_ends_with_nothing_left() -> None:
    told: list[tuple[int, float]] = []
    trials = capacities(6)
    Search(SPACE, WORKS, trials.submit, 0.9, 2, lambda done, left, words: told.append((done, left))).run()
    assert [done for done, _ in told] == list(range(1, len(trials.jobs) + 1))
    assert [done for done, left in told if not left] == [len(trials.jobs)]


def test_where_nothing_with_prefill_instances_is_better_it_says_to_stay_aggregated() -> None:
    trials = FakeTrials(lambda candidate, changes: 2.0 if candidate.topology.kind is Kind.AGGREGATED else 1.0)
    lines = conclusion(searched(trials).confirmed)
    assert lines[0].startswith("Stay aggregated: ")
    assert any(line.startswith("The best mixed topology") and ": 0." in line for line in lines)


def test_where_nothing_holds_it_says_so() -> None:
    trials = FakeTrials(lambda candidate, changes: 1e-6)
    assert "No candidate holds any rate" in conclusion(searched(trials).confirmed)[0]
