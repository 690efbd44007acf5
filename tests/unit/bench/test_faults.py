from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pdmux_ray.bench.fault_points import FAULTS, Case, Client, Clients
from pdmux_ray.bench.faults import Found, Outcome, line, parser, table

CASE = Case([5, 6, 7], {}, [1, 2, 3])


def test_every_fault_is_tried_unless_some_are_named() -> None:
    assert parser().parse_args([]).faults == list(FAULTS)
    assert parser().parse_args(["--faults", "partition,refuse"]).faults == ["partition", "refuse"]


def test_a_fault_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--faults", "flood"])
    assert "flood: there are leave-client" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("client", "verdict"),
    [
        (Client(CASE, [1, 2, 3], ended=True), "right"),
        (Client(CASE, [1, 2, 4], ended=True), "wrong"),
        (Client(CASE, [1, 2], ended=True), "wrong"),
        (Client(CASE, [1, 2, 3]), "failed"),
        (Client(CASE, [1], ended=True, error="no"), "failed"),
        (Client(CASE, [1, 2], left=True), "left"),
        (Client(CASE, [1, 3], left=True), "wrong"),
    ],
)
def test_an_answer_must_be_whole_and_what_a_client_had_when_it_left_right(client: Client, verdict: str) -> None:
    assert client.verdict == verdict


def test_what_is_heard_of_a_request_is_kept_and_of_others_not() -> None:
    clients, client = Clients(), Client(CASE)
    clients.add({"r": client})
    clients.heard([("r", 1, None, None), ("q", 9, None, None)])
    clients.heard([("r", 2, None, None), ("r", 3, "length", None)])
    clients.wait([client])
    assert client.verdict == "right"


def one(*verdicts: Any, fault: str = "kill-prefill", noticed: float = 0.1, trouble: str | None = None) -> Outcome:
    leaked = 3 if trouble else 0
    return Outcome(fault, verdicts, ((noticed, 0.25),), 0.5, leaked, trouble, Counter(landed=2, peer_dead=1))


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [
        (one("right", "left"), ""),
        (one("right", "wrong", "failed"), "1 wrong, 1 failed"),
        (one("right", noticed=0.3), "noticed after 0.300 s, not 0.25"),
        (one("right", noticed=float("inf")), "noticed after inf s, not 0.25"),
        (one("right", trouble="d1 has 3 held pages"), "d1 has 3 held pages"),
    ],
)
def test_a_point_is_good_when_answers_are_right_nothing_is_left_and_it_was_noticed_in_time(
    outcome: Outcome, wrong: str
) -> None:
    assert line(outcome) == wrong
    assert outcome.good is not bool(wrong)


def test_the_table_sums_up_each_fault_and_says_what_was_not_run() -> None:
    outcomes = [one("right", "left"), one("wrong", noticed=0.2, trouble="d1 has 3 held pages"), one("right", fault="refuse")]
    assert table(Found(outcomes, {"partition": "network namespaces need root"}))[2:] == [
        "| kill-prefill | 2 | 3 | 1 | 1 | 0 | 3 | 0.200 s (2) | 0.25 s | 0.5 s | 1 | landed 4, peer_dead 2 |",
        "| refuse | 1 | 1 | 0 | 0 | 0 | 0 | 0.100 s (1) | 0.25 s | 0.5 s | 0 | landed 2, peer_dead 1 |",
        "| partition | not run |  |  |  |  |  |  |  |  |  | network namespaces need root |",
    ]
