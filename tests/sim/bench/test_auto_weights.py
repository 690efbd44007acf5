from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import auto_weights
from pdmux_ray.bench.auto_weights import RATES, AskedWork, Question, Weights, answer, table, weighed, work_of
from pdmux_ray.bench.cli import TOKEN_IDS
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.policy import mode_choice
from pdmux_ray.workload.source import load_workload
from tests.unit.sim.fleets import device

NOW = Weights.now()
WORK = AskedWork("mix", load_workload("fixed:60,6", token_ids=TOKEN_IDS), Slo(ttft_s=0.1, itl_s=0.03))


def test_weights_hold_while_a_run_is_simulated_and_no_longer() -> None:
    with weighed(Weights(7.0, 9.0)):
        assert (mode_choice.MISSES_PER_LATE_TOKEN, mode_choice.MISSES_PER_LOST_SECOND) == (7.0, 9.0)
    with pytest.raises(ValueError, match="amid a run"), weighed(Weights(7.0, 9.0)):
        raise ValueError("amid a run")
    with weighed(None):
        assert Weights.now() == NOW
    assert Weights.now() == NOW


@pytest.mark.parametrize("weights", [NOW, None])
def test_a_share_of_good_requests_is_that_of_the_same_requests_each_time(weights: Weights | None) -> None:
    slow, fast = (
        [answer(Question(WORK, rate, weights), device(), 0.05, requests=20, seed=1) for _ in range(2)] for rate in (5.0, 500.0)
    )
    assert slow == [1.0, 1.0]
    assert fast[0] == fast[1] < 1.0


def test_a_row_says_which_weights_policies_have_now_and_ends_with_its_mean() -> None:
    ways = [NOW, Weights(5.0, 6.0), None]
    shares = {
        Question(WORK, rate, way).key: share for way in ways for rate, share in zip(RATES["mix"], (0.9, 0.7), strict=True)
    }
    heads, _, now, other, split = table([WORK], ways, shares)
    assert heads == "| | mix 2.6/s | mix 3.7/s | mean |"
    assert now == "| auto, late 2, lost 2 (now) | 90 % | 70 % | 80 % |"
    assert other.startswith("| auto, late 5, lost 6 | 90 %")
    assert split.startswith("| split | 90 %")


def test_every_kind_of_work_has_requests() -> None:
    assert {name: len(work_of(name).asks(3, 0)) for name in RATES} == dict.fromkeys(RATES, 3)


@pytest.mark.parametrize("weights", ["", "1,x", "0", "1,-2"])
def test_weights_that_are_none_are_refused(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert auto_weights.main(["--profile", str(tmp_path / "p.json"), "--late", weights]) == 2
    assert "no list of weights" in capsys.readouterr().err


def test_work_that_there_is_none_of_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert auto_weights.main(["--profile", str(tmp_path / "p.json"), "--work", "chats"]) == 2
    assert "there is no work chats" in capsys.readouterr().err
