from __future__ import annotations

import pytest

from pdmux_ray.bench.handoffs import FAULTS, Round, parser


def test_every_fault_is_tried_unless_some_are_named() -> None:
    assert parser().parse_args([]).faults == list(FAULTS)
    assert parser().parse_args(["--faults", "kill-decode,freeze-prefill"]).faults == ["kill-decode", "freeze-prefill"]


def test_a_fault_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--faults", "kill-gateway"])
    assert "kill-gateway: there are kill-prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (Round(1.0, 0, 0, None), True),
        (Round(1.0, 1, 0, None), False),
        (Round(1.0, 0, 1, None), False),
        (Round(1.0, 0, 0, "3 pages are not free"), False),
    ],
)
def test_a_round_is_good_when_every_answer_was_right_and_nothing_is_left(found: Round, good: bool) -> None:
    assert found.good is good
