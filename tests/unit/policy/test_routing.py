from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pdmux_ray.policy.decisions import RouteChoice, RouteReason, Unfit
from pdmux_ray.policy.routing import FitnessLimits, choose_instance, unfit
from pdmux_ray.policy.views import InstanceView

LIMITS = FitnessLimits(silence_s=5.0, stall_timeout_s=60.0)

WELL = InstanceView(
    "well",
    running=0,
    waiting=0,
    free_pages=100,
    step_age_s=0.0,
    silence_s=0.5,
    on_their_way=0,
    line_is_up=True,
    leaving=False,
    ailing=False,
)

UNFIT = {
    Unfit.NO_LINE: replace(WELL, line_is_up=False),
    Unfit.SILENT: replace(WELL, silence_s=5.1),
    Unfit.STALLED: replace(WELL, step_age_s=56.0, silence_s=4.1),
    Unfit.AILING: replace(WELL, ailing=True),
    Unfit.LEAVING: replace(WELL, leaving=True),
}


def seen(instance_id: str, running: int = 0, waiting: int = 0, free_pages: int = 100, on_their_way: int = 0) -> InstanceView:
    return replace(
        WELL, instance_id=instance_id, running=running, waiting=waiting, free_pages=free_pages, on_their_way=on_their_way
    )


def choose(*views: InstanceView) -> RouteChoice:
    return choose_instance(views, LIMITS, Random(1))


def test_no_instance_no_choice() -> None:
    assert choose() == RouteChoice(None, RouteReason.NONE_LINKED)


@pytest.mark.parametrize("why", Unfit)
def test_an_instance_that_is_not_fit_is_not_taken_even_when_it_is_the_only_one(why: Unfit) -> None:
    assert unfit(UNFIT[why], LIMITS) is why
    assert choose(UNFIT[why]) == RouteChoice(None, RouteReason.NONE_FIT)
    assert choose(UNFIT[why], seen("busy", running=64)) == RouteChoice("busy", RouteReason.ONLY_ONE)


@pytest.mark.parametrize("view", [replace(WELL, silence_s=5.0), replace(WELL, step_age_s=56.0, silence_s=4.0), WELL])
def test_an_instance_at_its_limits_is_fit(view: InstanceView) -> None:
    assert unfit(view, LIMITS) is None


def test_an_idle_instance_is_not_stalled_however_long_it_has_been_silent() -> None:
    assert unfit(replace(WELL, silence_s=100.0), FitnessLimits(silence_s=1000.0, stall_timeout_s=60.0)) is None


def test_a_single_instance_is_taken_however_loaded_it_is() -> None:
    assert choose(seen("a", running=64, waiting=200)) == RouteChoice("a", RouteReason.ONLY_ONE)


def test_the_instance_with_the_fewest_requests_is_taken_whether_they_run_or_wait() -> None:
    views = [seen("a", running=3), seen("b", running=1, waiting=1), seen("c", waiting=4)]
    assert choose(*views) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_requests_on_their_way_count_so_that_a_burst_does_not_go_to_one_instance() -> None:
    assert choose(seen("a", on_their_way=2), seen("b", running=1)) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_among_equally_busy_instances_the_one_with_more_free_pages_is_taken() -> None:
    views = [seen("a", running=2, free_pages=10), seen("b", running=2, free_pages=90)]
    assert choose(*views) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_equals_are_drawn_and_every_one_of_them_can_be() -> None:
    views = [seen("a"), seen("b"), seen("c", running=1)]
    rng = Random(7)
    choices = [choose_instance(views, LIMITS, rng) for _ in range(50)]
    assert {choice.instance_id for choice in choices} == {"a", "b"}
    assert {choice.reason for choice in choices} == {RouteReason.TIE}
