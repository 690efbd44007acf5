"""Who is tried next, where."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.tune.race import Probe, Race
from tests.examples import tried

SIZE = 60
fleets = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12)  # the last index that each entry holds


def race_of(starts: list[int], groups: str = "") -> Race:
    """`groups`: a letter each; without them all are of one."""
    race = Race(SIZE)
    for number, start in enumerate(starts):
        race.add(start, groups[number] if groups else None)
    return race


def run(race: Race, last: list[int], together: int = 1, seed: int = 0, unclear: int = 0) -> list[Probe]:
    """To the end, `together` at once, which end in any order. Who fails by at most `unclear` rates does so unclearly."""
    rng, under_way, done = Random(seed), list[Probe](), list[Probe]()
    while True:
        while len(under_way) < together and (probe := race.next()) is not None:
            under_way.append(probe)
        if not under_way:
            return done
        probe = under_way.pop(rng.randrange(len(under_way)))
        over = probe.index - last[probe.entry]
        race.note(probe, over <= 0, over > unclear)
        done.append(probe)


@settings(max_examples=tried(60))
@given(
    last=fleets, start=st.integers(0, SIZE - 1), together=st.integers(1, 4), seed=st.integers(0, 99), unclear=st.integers(0, 3)
)
def test_whoever_carries_most_is_found_whatever_runs_at_once(
    last: list[int], start: int, together: int, seed: int, unclear: int
) -> None:
    race = race_of([start] * len(last))
    probes = run(race, last, together, seed, unclear)
    assert race.leading() == max(last)
    assert max(Counter(probes).values()) == 1
    best = last.index(max(last))
    assert race.held(best) == last[best]
    assert not race.beaten(best)


@settings(max_examples=tried(60))
@given(last=fleets, together=st.integers(1, 4))
def test_who_is_beaten_has_clearly_failed_where_another_one_holds_and_all_others_are_known(
    last: list[int], together: int
) -> None:
    race = race_of([SIZE // 2] * len(last))
    probes = run(race, last, together)
    for entry, most in enumerate(last):
        if race.beaten(entry):
            assert any(probe.entry == entry and most < probe.index <= max(last) for probe in probes)
        else:
            assert race.held(entry) == most


def test_those_who_follow_the_winner_cost_one_run_each() -> None:
    last = [40, *[35] * 9]
    assert Counter(probe.entry for probe in run(race_of([38] * 10), last)) == {0: 5, **dict.fromkeys(range(1, 10), 1)}


def test_who_fails_too_narrowly_to_be_sure_is_searched_to_its_end() -> None:
    race = race_of([40, 40])
    run(race, [40, 39], unclear=1)
    assert race.held(1) == 39


def test_who_must_be_known_is_searched_to_its_end_though_it_is_beaten() -> None:
    race = race_of([40, 40])
    run(race, [40, 11])
    assert race.beaten(1)
    race.search_to_the_end([1])
    run(race, [40, 11])
    assert not race.beaten(1)
    assert race.held(1) == 11


def test_who_comes_later_is_tried_at_the_leader_s_rate() -> None:
    race = race_of([40])
    run(race, [45])
    assert race.add(3) == 1
    assert race.next() == Probe(1, 45)


def test_groups_have_winners_of_their_own() -> None:
    race = race_of([40] * 4, "aabb")
    run(race, [45, 20, 11, 9])
    assert [race.beaten(entry) for entry in range(4)] == [False, True, False, True]
    assert (race.leading("a"), race.leading("b")) == (45, 11)


def test_what_is_left_falls_to_nothing() -> None:
    race = race_of([30] * 5)
    assert race.left() > 5
    run(race, [30, 20, 31, 5, 9])
    assert race.left() == 0


def test_who_holds_not_even_the_lowest_rate_is_known_to() -> None:
    race = race_of([3])
    run(race, [-1])
    assert race.held(0) is None
    assert race.leading() is None
