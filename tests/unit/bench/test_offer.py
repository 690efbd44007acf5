from __future__ import annotations

import pytest

from pdmux_ray.bench.load.offer import MAX_REQUESTS, Offer
from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.arrivals import Arrivals
from pdmux_ray.workload.source import load_workload

FIXED = load_workload("fixed:16,4", token_ids=(10, 1000))


def prompts(offer: Offer, rate: float, round_index: int = 0) -> list[object]:
    return [planned.ask.prompt for planned in offer.planned(rate, round_index)]


def test_the_same_seed_offers_every_target_the_same_prompts_at_the_same_times() -> None:
    one, other = (Offer(FIXED, requests=8, seed=3).planned(2.0, 1) for _ in range(2))
    assert one == other


def test_no_two_runs_share_prompts_that_a_server_could_have_cached() -> None:
    offer = Offer(FIXED, requests=8)
    runs = [prompts(offer, 1.0), prompts(offer, 2.0), prompts(offer, 1.0, 1), prompts(Offer(FIXED, requests=8, seed=1), 1.0)]
    assert len({prompt for run in runs for prompt in run}) == 32


def test_a_run_does_not_depend_on_the_runs_beside_it() -> None:
    offer = Offer(FIXED, requests=8)
    alone = offer.planned(4.0, 0)
    offer.planned(1.0, 0)
    assert offer.planned(4.0, 0) == alone


def test_a_duration_gives_a_rate_its_count_and_the_warm_up_comes_on_top() -> None:
    offer = Offer(FIXED, duration_s=10.0, warmup=3)
    assert (offer.count(2.5), len(offer.planned(2.5, 0)), offer.seconds(2.5)) == (25, 28, 11.2)
    assert offer.count(0.01) == 1


def test_too_many_requests_are_refused_before_any_is_made() -> None:
    with pytest.raises(ConfigError, match="too many"):
        Offer(FIXED, requests=MAX_REQUESTS, warmup=1).count(1.0)


def test_a_workload_without_times_has_no_trace_to_follow() -> None:
    with pytest.raises(ConfigError, match="times of its own"):
        Offer(FIXED, Arrivals("trace"), requests=4).planned(1.0, 0)


def test_what_is_made_when_it_is_looked_at_is_what_is_planned() -> None:
    for workload in (FIXED, load_workload("sharegpt", token_ids=(10, 1000))):
        offer = Offer(workload, requests=8, warmup=2, seed=5)
        assert list(offer.coming(3.0, 1)) == offer.planned(3.0, 1)
        assert (len(offer.coming(3.0, 1)), offer.coming(3.0, 1)[-1]) == (10, offer.planned(3.0, 1)[-1])
