"""Where candidates stand, what follows, and what is left for those who serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pdmux_ray.config import load_serve_config, require_profile
from pdmux_ray.costs.gpu import SHAPES
from pdmux_ray.metrics.goodput import Bound, RatePoint, Slo
from pdmux_ray.tune.binding import Binds
from pdmux_ray.tune.candidates import LOCAL, PREDICT, Candidate, Kind, Route, Topology, configured
from pdmux_ray.tune.fake_trials import FakeTrials
from pdmux_ray.tune.search import Job
from pdmux_ray.tune.served import PROFILE, Servers, base_settings, expected, serve_config
from pdmux_ray.tune.standing import Standing, conclusion, first_of, ranked, ratio, winner_of
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
    assert first_of([low, near], Kind.MIXED) is None
    assert first_of([low, near, high], *Kind) is low


def test_a_ratio_has_an_interval_and_is_sure_only_where_that_lies_above_one() -> None:
    low, high = standing(AGGREGATED, 2.4), standing(MIXED, 4.4)
    found = ratio(high, low)
    assert found.ci[0] <= found.ratio <= found.ci[1]
    assert found.sure
    assert not ratio(low, high).sure


@pytest.mark.parametrize("capacity", [0.5, 0.9, 1.05, 2.4, 50.0])
def test_a_candidate_is_exactly_as_good_as_itself_whatever_it_holds(capacity: float) -> None:
    found = standing(MIXED, capacity)
    assert (ratio(found, found).ratio, ratio(found, found).ci) == (1.0, (1.0, 1.0))


def test_requests_that_miss_of_both_make_no_difference_between_them_at_whichever_rates_they_were_tried() -> None:
    """Theirs fail in the same rows of requests as ours, at a rate that is 10 % lower: the ratio is 1.1 in any resample."""
    ours, theirs = (missing_in_rows((1.0 * by, 2.0 * by, 3.0 * by)) for by in (1.1, 1.0))
    more = replace(theirs, found=[*missing_in_rows((0.5, 0.7)).found[:1], *theirs.found])
    assert ratio(ours, theirs).ci == pytest.approx((1.1, 1.1))
    assert ratio(ours, more).ci == pytest.approx((1.1, 1.1))
    assert theirs.goodput.ci[1] > 1.05 * theirs.goodput.ci[0]


def missing_in_rows(rates: tuple[float, ...]) -> Standing:
    """None at the first rate, a tenth less one at the next ones, a third at the last."""
    rows = [[], [*range(300, 345), *range(600, 645)], [*range(300, 500), *range(600, 730)]]
    base = standing(MIXED, 3.0).found[0]
    goods = [[place not in row for place in range(1000)] for row in [*rows[:1], *rows[1:2] * (len(rates) - 2), rows[2]]]
    found = [replace(base, point=RatePoint(rate, good)) for rate, good in zip(rates, goods, strict=True)]
    return Standing(MIXED, found, 0.9, 4, False)


def test_over_one_that_holds_nothing_a_ratio_is_at_least_that_to_the_lowest_rate() -> None:
    found = ratio(standing(MIXED, 3.5), standing(AGGREGATED, 0.5))
    assert found.at_least
    assert found.ratio == pytest.approx(standing(MIXED, 3.5).goodput.rps * 4 / 1.0)
    assert str(found).startswith("at least ")


def test_the_conclusion_names_the_winner_how_sure_it_is_and_what_a_mix_is_worth() -> None:
    lines = conclusion([standing(MIXED, 4.4), standing(AGGREGATED, 2.4), standing(DISAGGREGATED, 2.2)])
    assert lines[0].startswith("Take 1P+3M, TP 1, auto, predict: ")
    assert lines[1].startswith("It is surely better than the next one, 4M, TP 1, chunked: ")
    assert lines[2].startswith(
        "The best mixed topology (1P+3M, TP 1, auto, predict) over the pure one that has most (4M, TP 1, chunked): "
    )
    assert lines[3] == "What keeps 1P+3M from carrying more: prefill."


def growing(found: Found) -> Found:
    return replace(found, falls_behind=True)


def test_a_rate_at_which_the_queue_grew_does_not_hold_however_many_were_good_yet() -> None:
    found = standing(AGGREGATED, 3.5)  # holds 1, 2, 3
    grew = replace(found, found=[*found.found[:2], growing(found.found[2]), *found.found[3:]])
    assert grew.held is grew.found[1]
    assert 2 / 4 <= grew.goodput.rps < 2.2 / 4
    assert grew.goodput.ci[1] < 2.2 / 4 < found.goodput.rps
    assert grew.binds is Binds.PREFILL
    assert ranked([grew, standing(MIXED, 2.9)])[0].candidate == MIXED
    assert "its queue was growing" in conclusion([grew])[-1]
    assert "At 0.75 requests/s per GPU" in conclusion([grew])[-1]


def test_where_the_queue_grew_at_every_rate_nothing_holds() -> None:
    found = standing(AGGREGATED, 50.0)
    grew = replace(found, found=[growing(each) for each in found.found])
    assert (grew.held, grew.goodput.rps, grew.goodput.bound) == (None, 0.0, Bound.BELOW)
    assert "No candidate holds any rate" in conclusion([grew])[0]


def of_few(candidate: Candidate, missed: set[int]) -> Standing:
    """Twenty requests at each of three rates: all good, all but those at these places, none."""
    base = standing(candidate, 3.0).found[0]
    goods = [[True] * 20, [place not in missed for place in range(20)], [False] * 20]
    found = [replace(base, point=RatePoint(rate, good)) for rate, good in zip((1.0, 2.0, 3.0), goods, strict=True)]
    return Standing(candidate, found, 0.9, 4, False)


def test_the_winner_is_the_one_that_was_chosen_before_and_it_is_told_when_another_one_has_more_now() -> None:
    chosen, best = of_few(MIXED, {0, 1, 2, 3}), of_few(AGGREGATED, {5, 6, 7})
    lines = conclusion([chosen, best])
    assert winner_of([chosen, best]) is chosen
    assert lines[0].startswith("Take 1P+3M, TP 1, auto, predict: ")
    assert lines[1].startswith("It is not surely better than the next one, 4M, TP 1, chunked: ")
    assert lines[2].startswith("It was chosen on other requests; on these 4M, TP 1, chunked has more, ")
    assert "has more" not in " ".join(conclusion([best, chosen])[1:])


def test_one_that_is_surely_better_on_other_requests_is_taken_instead_of_the_chosen_one() -> None:
    chosen, better = standing(MIXED, 2.4), standing(AGGREGATED, 4.4)
    lines = conclusion([chosen, better])
    assert winner_of([chosen, better]) is better
    assert lines[0].startswith("Stay aggregated: 4M, TP 1, chunked has ")
    assert lines[2].startswith("1P+3M, TP 1, auto, predict was chosen on other requests; on these it is surely worse: ")


def test_a_mix_is_held_against_the_pure_one_that_has_most_not_the_one_that_was_chosen_first() -> None:
    found = " ".join(conclusion([standing(MIXED, 3.0), standing(DISAGGREGATED, 2.2), standing(AGGREGATED, 2.6)]))
    assert "over the pure one that has most (4M, TP 1, chunked): " in found


def test_where_nothing_holds_no_ratio_is_told() -> None:
    lines = conclusion([standing(MIXED, 0.5), standing(AGGREGATED, 0.4)])
    assert "over the pure one" not in " ".join(lines)


def test_one_that_holds_nothing_now_does_not_win() -> None:
    none, some = standing(MIXED, 0.5), standing(AGGREGATED, 2.4)
    assert winner_of([none, some]) is some
    assert conclusion([none, some])[0].startswith("Stay aggregated: 4M, TP 1, chunked has ")


def test_it_does_not_say_that_nothing_has_more_where_something_has() -> None:
    aggregated, mixed = standing(AGGREGATED, 2.4), standing(MIXED, 4.4)
    assert "nothing with prefill instances has more" not in conclusion([aggregated, mixed])[0]
    assert "nothing with prefill instances has more" in conclusion([aggregated, standing(MIXED, 1.4)])[0]


@pytest.mark.parametrize(
    ("candidate", "gpu", "shape", "lack"),
    [
        (AGGREGATED, True, "llama-8b", None),
        (MIXED, True, "llama-8b", "cannot share their KV"),
        (DISAGGREGATED, True, None, "cannot share their KV"),
        (MIXED, False, None, None),
        (Candidate(Topology(2, 0, 2, 0), Mode.AUTO, LOCAL), True, "llama-70b", "no tensor parallelism"),
        (AGGREGATED, True, "opt-13b", "OPT-13B"),
    ],
)
def test_what_servers_lack_to_run_a_candidate_is_told(
    candidate: Candidate, gpu: bool, shape: str | None, lack: str | None
) -> None:
    found = Servers(SHAPES[shape] if shape else None, gpu)
    assert found.can_run(candidate) is (lack is None)
    assert lack is None or lack in (found.lack(candidate) or "")


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
