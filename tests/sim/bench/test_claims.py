"""What comparisons of modes must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench.claims import Claim, Verdict, all_hold, claims, deciding, table
from tests.sim.bench.test_comparison import session_of

GOOD, BAD = 1.0, 0.5


def test_auto_is_held_against_the_best_fixed_mode_of_each_shape(tmp_path: Path) -> None:
    fast, slow = {1.0: GOOD, 4.0: GOOD, 8.0: BAD}, {1.0: GOOD, 2.0: BAD}
    rates = {"prefill_first": slow, "split": fast, "auto": fast}
    sessions = {name: session_of(tmp_path, name, good) for name, good in rates.items()}
    (found,) = claims({"sharegpt": sessions})
    assert found.over.startswith("split")
    assert found.ratio == pytest.approx(1.0)
    assert found.verdict is Verdict.HOLDS


def test_on_the_long_in_shape_auto_is_also_held_against_chunked_512_and_the_peer(tmp_path: Path) -> None:
    sessions = {
        name: session_of(tmp_path, name, {1.0: GOOD, rate: BAD}) for name, rate in {"chunked-512": 2.0, "auto": 2.0}.items()
    }
    best, chunked, peer = claims({"loogle": sessions})
    assert best.verdict is Verdict.HOLDS
    assert (chunked.over, chunked.limit, chunked.verdict) == ("chunked-512", 2.0, Verdict.MISSED)
    assert (peer.over, peer.verdict) == ("the peer", Verdict.UNKNOWN)
    assert not all_hold([best, chunked, peer])


def test_over_a_server_that_held_no_rate_the_ratio_is_at_least_to_the_lowest(tmp_path: Path) -> None:
    auto = session_of(tmp_path, "auto", {1.0: GOOD, 4.0: GOOD, 8.0: BAD})
    other = session_of(tmp_path, "peer", {1.0: BAD, 2.0: BAD})
    *_, peer = claims({"loogle": {"auto": auto, "peer": other}})
    assert peer.at_least
    assert peer.ratio == pytest.approx(auto.summary().goodput_rps)
    assert peer.verdict is Verdict.HOLDS


def test_a_server_that_missed_its_lowest_rate_by_little_may_be_better_than_that(tmp_path: Path) -> None:
    auto = session_of(tmp_path, "auto", {1.0: GOOD, 2.0: GOOD, 4.0: BAD})
    other = session_of(tmp_path, "peer", {1.0: 0.85, 4.0: 0.8})
    *_, peer = claims({"loogle": {"auto": auto, "peer": other}})
    assert peer.at_least
    assert peer.ratio is not None
    assert peer.ratio > 2.0
    assert peer.verdict is Verdict.LIKELY


def test_over_a_server_that_held_every_rate_the_ratio_is_at_most_that(tmp_path: Path) -> None:
    more, less = {1.0: GOOD, 2.0: GOOD, 4.0: BAD}, {1.0: GOOD, 1.5: BAD}
    sessions = {"auto": more, "split": {1.0: GOOD}}
    (found,) = claims({"sharegpt": {name: session_of(tmp_path, name, good) for name, good in sessions.items()}})
    assert (found.at_most, found.verdict) == (True, Verdict.OPEN)
    assert found.cells[2].startswith("at most 2")
    sessions = {"auto": less, "split": {4.0: GOOD}}
    (found,) = claims({"sharegpt": {name: session_of(tmp_path / "less", name, good) for name, good in sessions.items()}})
    assert found.verdict is Verdict.MISSED


def test_of_two_that_held_every_rate_nothing_is_known(tmp_path: Path) -> None:
    sessions = {name: session_of(tmp_path, name, {1.0: GOOD, 2.0: GOOD}) for name in ("auto", "split")}
    (found,) = claims({"sharegpt": sessions})
    assert found.verdict is Verdict.OPEN
    assert found.cells[2:4] == ["–", "–"]


def test_a_ratio_below_its_limit_is_open_while_its_interval_reaches_it() -> None:
    assert Claim("s", "x", 0.97, 0.9, (0.8, 1.0)).verdict is Verdict.OPEN
    assert Claim("s", "x", 0.97, 0.9, (0.8, 0.95)).verdict is Verdict.MISSED
    assert Claim("s", "x", 2.0, 1.5, None, at_least=True).verdict is Verdict.OPEN
    assert "0.90" in table([Claim("s", "x", 0.97, 0.9, (0.8, 0.95))])[-1]


def test_a_ratio_above_its_limit_is_likely_until_an_interval_shows_it() -> None:
    assert Claim("s", "x", 0.97, 1.0, (0.98, 1.1)).verdict is Verdict.HOLDS
    assert Claim("s", "x", 0.97, 1.0, (0.5, 1.1)).verdict is Verdict.LIKELY
    assert Claim("s", "x", 0.97, 1.0, None, requests=(80, 80)).verdict is Verdict.LIKELY
    assert not all_hold([Claim("s", "x", 0.97, 1.0, (0.5, 1.1))])


def test_a_ratio_says_how_many_requests_decided_it(tmp_path: Path) -> None:
    auto = session_of(tmp_path, "auto", {1.0: GOOD, 4.0: GOOD, 8.0: BAD})
    auto.add(auto.records[1])
    other = session_of(tmp_path, "split", {1.0: GOOD, 2.0: GOOD})
    (found,) = claims({"sharegpt": {"auto": auto, "split": other}})
    assert found.requests == (120, 40)  # of two runs at 4 and one at 8; of one at 2, the highest
    assert "| 120 and 40 |" in table([found])[-1]


def test_where_no_rate_held_the_requests_of_the_lowest_decided(tmp_path: Path) -> None:
    assert deciding(session_of(tmp_path, "peer", {2.0: BAD, 1.0: BAD})) == 40
