from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pdmux_ray.bench.simulated_steering import DEVICES, LONG, PREDICT, WAYS, Outcome, Way, compare
from pdmux_ray.costs.gpu import H200
from pdmux_ray.metrics.goodput import RatePoint
from pdmux_ray.types import Role
from pdmux_ray.workload.requests import Ask


@dataclass(frozen=True)
class Alike:
    """A `Workload` of prompts of one length."""

    tokens: int = 600
    name: str = "alike"
    description: tuple[str, ...] = ()

    def asks(self, count: int, seed: int) -> list[Ask]:
        return [Ask((index, *(7,) * (self.tokens - 1)), 3) for index in range(count)]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    ways = (Way(PREDICT, "predict"), Way("remote", "remote"), Way("mux", "local", prefill=0))
    return compare(ways, Alike(), [10.0, 20.0], seconds=0.5, gpu=replace(H200, memory_bytes=20e9))


def test_every_way_has_every_rate_and_a_goodput(outcomes: list[Outcome]) -> None:
    assert [[run.rate for run in outcome.summary.runs] for outcome in outcomes] == [[10.0, 20.0]] * 3
    assert [outcome.summary.goodput_rps for outcome in outcomes] == [20.0 / DEVICES] * 3  # an idle fleet keeps every objective
    assert [outcome.goodput(0.99).rps for outcome in outcomes] == [20.0] * 3


def test_goodputs_are_compared_on_the_same_requests(outcomes: list[Outcome]) -> None:
    good, other = outcomes[0], replace(outcomes[1], verdicts=[RatePoint(10.0, [True] * 20), RatePoint(20.0, [False] * 20)])
    assert good.times_that_of(good, 0.9) == (1.0, 1.0)
    assert good.times_that_of(other, 0.9) == pytest.approx((20 / 11, 20 / 11))
    assert good.times_that_of(replace(other, verdicts=other.verdicts[1:]), 0.9) == (1.0, None), "less than the lowest rate"


def test_where_all_must_be_good_one_that_is_not_costs_a_way_its_rate(outcomes: list[Outcome]) -> None:
    one_missed = replace(outcomes[0], verdicts=[RatePoint(10.0, [True] * 20), RatePoint(20.0, [True] * 19 + [False])])
    assert one_missed.at(0.95).summary.goodput_rps == 20.0 / DEVICES
    assert one_missed.at(1.0).summary.goodput_rps == 10.0 / DEVICES


def test_ways_have_the_same_requests(outcomes: list[Outcome]) -> None:
    sizes = {tuple((run.requests, run.prompt_tokens, run.output_tokens) for run in o.summary.runs) for o in outcomes}
    assert sizes == {((5, 3000, 15), (10, 6000, 30))}


def test_it_says_why_routes_were_taken(outcomes: list[Outcome]) -> None:
    predict, remote, _ = outcomes
    assert dict(remote.reasons[0]) == {"always": 5}
    assert None not in predict.predicted
    assert remote.predicted == [None, None]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_s_fleet_has_all_devices(way: Way) -> None:
    roles = way.config(1e9).roles
    assert len(roles) == DEVICES
    assert roles.count(Role.PREFILL) == way.prefill


def test_long_prompts_are_as_long_as_is_said() -> None:
    outlines = LONG.outlines(512, 0)
    assert sum(outline.prompt_tokens for outline in outlines) / 512 == pytest.approx(16_000, rel=0.02)
