from __future__ import annotations

import random
from itertools import islice

import pytest

from pdmux_ray.bench.handoffs import FAULTS, Round, Verdict, draw_requests, parser, table


def test_every_fault_is_tried_unless_some_are_named() -> None:
    assert parser().parse_args([]).faults == list(FAULTS)
    assert parser().parse_args(["--faults", "kill-decode,leave-client"]).faults == ["kill-decode", "leave-client"]


def test_a_fault_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--faults", "kill-gateway"])
    assert "kill-gateway: there are kill-prefill" in capsys.readouterr().err


def one(*verdicts: Verdict, fault: str = "kill-decode", leaked: int = 0, trouble: str | None = None) -> Round:
    return Round(fault, 2.0, 1.0, verdicts, leaked, trouble)


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (one("right", "left"), True),
        (one("right", "failed"), False),
        (one("wrong"), False),
        (one("right", leaked=3, trouble="3 pages are not free"), False),
    ],
)
def test_a_round_is_good_when_every_answer_was_right_and_nothing_is_left(found: Round, good: bool) -> None:
    assert found.good is good


def test_the_table_sums_up_each_fault() -> None:
    leaking = one("wrong", leaked=3, trouble="3 pages are not free")
    assert table([one("right", "left"), leaking, one("right", fault="kill-prefill")])[2:] == [
        "| kill-decode | 2 | 3 | 1 | 1 | 0 | 3 | 1.0 | 1 |",
        "| kill-prefill | 1 | 1 | 0 | 0 | 0 | 0 | 1.0 | 0 |",
    ]


def test_drawn_requests_are_of_every_length_many_with_a_common_beginning_and_the_same_for_a_seed() -> None:
    drawn = list(draw_requests(200, 2000, random.Random(1)))
    assert list(islice(draw_requests(200, 2000, random.Random(1)), 5)) == drawn[:5]
    lengths = [len(prompt) for prompt, _ in drawn]
    assert min(lengths) < 10 < 1000 < max(lengths) <= 2000
    assert len({tuple(prompt[:3]) for prompt, _ in drawn}) < 150
