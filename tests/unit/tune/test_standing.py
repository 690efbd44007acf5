"""Where candidates stand, what follows, and what is left for those who serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pdmux_ray.config import load_serve_config, require_profile
from pdmux_ray.metrics.goodput import Bound, RatePoint, Slo
from pdmux_ray.tune.binding import Binds
from pdmux_ray.tune.candidates import LOCAL, PREDICT, Candidate, Kind, Route, Topology, configured
from pdmux_ray.tune.fake_trials import FakeTrials
from pdmux_ray.tune.search import Job
from pdmux_ray.tune.served import PROFILE, base_settings, expected, serve_config
from pdmux_ray.tune.standing import Standing, best_of, conclusion, ranked, ratio
from pdmux_ray.tune.trial import Found
from pdmux_ray.types import Mode

SLO = Slo(ttft_s=0.5, ttft_s_per_token=0.001, itl_s=0.05, itl_statistic="p90")
AGGREGATED = Candidate(Topology(1, 0, 4, 0), Mode.CHUNKED, LOCAL)
MIXED = Candidate(Topology(1, 1, 3, 0), Mode.AUTO, PREDICT)
DISAGGREGATED = Candidate(Topology(1, 2, 0, 2), Mode.AUTO, PREDICT)


def standing(candidate: Candidate, capacity: float, rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)) -> Standing:
    trials = FakeTrials(lambda candidate, changes: capacity)
    return Standing(candidate, [trials.judge(Job(candidate, rate)) for rate in rates], 0.9, 4, False)


def test_goodput_is_per_gpu_and_lies_between_what_held_and_what_failed() -> None:
    found = standing(MIXED, 3.5)
    assert 3 / 4 <= found.goodput.rps <= 4 / 4
    assert found.held is not None
    assert found.held.point.rate_rps == 3.0
    assert found.upper_rps == 4 / 4
    assert found.binds is Binds.PREFILL


def test_what_holds_everything_carries_at_least_that_and_nothing_binds_it() -> None:
    found = standing(MIXED, 50.0)
    assert found.goodput.bound is Bound.AT_LEAST
    assert (found.binds, found.failed) == (None, None)


def test_a_rate_that_holds_beyond_one_that_does_not_counts_for_nothing() -> None:
    good, bad = [True] * 100, [False] * 100
    base = standing(MIXED, 3.0).found[0]
    found = [replace(base, point=RatePoint(rate, verdicts)) for rate, verdicts in ((1.0, good), (2.0, bad), (3.0, good))]
    held = Standing(MIXED, found, 0.9, 4, False).held
    assert held is not None
    assert held.point.rate_rps == 1.0


def test_those_who_hold_more_come_first_and_those_who_hold_nothing_by_how_near_they_were() -> None:
    low, high = standing(AGGREGATED, 2.2), standing(MIXED, 4.2)
    near, far = standing(DISAGGREGATED, 0.9), standing(DISAGGREGATED, 0.6)
    assert ranked([far, low, near, high]) == [high, low, near, far]
    assert best_of([low, near], Kind.MIXED) is None


def test_a_ratio_has_an_interval_and_is_sure_only_where_that_lies_above_one() -> None:
    low, high = standing(AGGREGATED, 2.4), standing(MIXED, 4.4)
    found = ratio(high, low)
    assert found.ci[0] <= found.ratio <= found.ci[1]
    assert found.sure
    assert not ratio(low, high).sure
    assert ratio(low, low).ci == (1.0, 1.0)


def test_over_one_that_holds_nothing_a_ratio_is_at_least_that_to_the_lowest_rate() -> None:
    found = ratio(standing(MIXED, 3.5), standing(AGGREGATED, 0.5))
    assert found.at_least
    assert found.ratio == pytest.approx(standing(MIXED, 3.5).goodput.rps * 4 / 1.0)
    assert str(found).startswith("at least ")


def test_the_conclusion_names_the_winner_how_sure_it_is_and_what_a_mix_is_worth() -> None:
    lines = conclusion([standing(AGGREGATED, 2.4), standing(MIXED, 4.4), standing(DISAGGREGATED, 2.2)])
    assert lines[0].startswith("Take 1P+3M, TP 1, auto, predict: ")
    assert lines[1].startswith("It is surely better than the next one, 4M, TP 1, chunked: ")
    assert lines[2].startswith(
        "The best mixed topology (1P+3M, TP 1, auto, predict) over the best pure one (4M, TP 1, chunked): "
    )
    assert lines[3] == "What keeps 1P+3M from carrying more: prefill."


def test_a_growing_queue_at_the_last_rate_that_held_is_told() -> None:
    def growing(found: Found) -> Found:
        return replace(found, falls_behind=True)

    found = standing(AGGREGATED, 2.4)
    told = conclusion([replace(found, found=[growing(each) for each in found.found])])
    assert "its queue was growing" in told[-1]


@pytest.mark.parametrize("candidate", [AGGREGATED, MIXED, DISAGGREGATED, replace(MIXED, route=Route("threshold", 2048))])
def test_the_config_that_is_left_is_one_that_servers_take(candidate: Candidate, tmp_path: Path) -> None:
    text = serve_config(candidate, configured(base_settings("demo", SLO), candidate, 5e10), ["What it is."])
    (path := tmp_path / "serve.yaml").write_text(text)
    _, config = load_serve_config(path)
    require_profile(config)
    assert text.startswith("# What it is.\n")
    assert (config.engine.mode, config.engine.multiplex.itl_s) == (candidate.mode, 0.05)
    assert config.gateway.slo["default"].itl_statistic == "p90"
    assert len(config.roles) == 4
    assert yaml.safe_load(text)["applications"][0]["name"] == "pdmux"


def test_a_config_that_predicts_nothing_needs_no_profile() -> None:
    settings = configured(base_settings("demo", SLO), AGGREGATED, 5e10)
    assert PROFILE not in serve_config(AGGREGATED, settings, [])
    assert PROFILE in serve_config(MIXED, configured(base_settings("demo", SLO), MIXED, 5e10), [])


def test_what_is_expected_is_the_fleet_s_goodput_and_latencies_where_it_held() -> None:
    found = expected(standing(MIXED, 3.5), SLO)
    assert found.goodput_rps == pytest.approx(standing(MIXED, 3.5).goodput.rps * 4)
    assert [found.ttft_p99_s, found.itl_p99_s] == pytest.approx([0.1, 0.02])
    assert (found.ttft_limit_s, found.itl_limit_s) == (0.5, 0.05)
