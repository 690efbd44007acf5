from __future__ import annotations

from random import Random

from pdmux_ray.policy.decisions import RouteChoice, RouteReason
from pdmux_ray.policy.routing import choose_instance
from pdmux_ray.policy.views import InstanceView


def seen(instance_id: str, running: int = 0, waiting: int = 0, free_pages: int = 100, on_their_way: int = 0) -> InstanceView:
    return InstanceView(instance_id, running, waiting, free_pages, on_their_way)


def test_no_instance_no_choice() -> None:
    assert choose_instance([], Random(1)) is None


def test_a_single_instance_is_taken_however_loaded_it_is() -> None:
    assert choose_instance([seen("a", running=64, waiting=200)], Random(1)) == RouteChoice("a", RouteReason.ONLY_ONE)


def test_the_instance_with_the_fewest_requests_is_taken_whether_they_run_or_wait() -> None:
    views = [seen("a", running=3), seen("b", running=1, waiting=1), seen("c", waiting=4)]
    assert choose_instance(views, Random(1)) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_requests_on_their_way_count_so_that_a_burst_does_not_go_to_one_instance() -> None:
    views = [seen("a", on_their_way=2), seen("b", running=1)]
    assert choose_instance(views, Random(1)) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_among_equally_busy_instances_the_one_with_more_free_pages_is_taken() -> None:
    views = [seen("a", running=2, free_pages=10), seen("b", running=2, free_pages=90)]
    assert choose_instance(views, Random(1)) == RouteChoice("b", RouteReason.LEAST_LOADED)


def test_equals_are_drawn_and_every_one_of_them_can_be() -> None:
    views = [seen("a"), seen("b"), seen("c", running=1)]
    rng = Random(7)
    choices = [choose_instance(views, rng) for _ in range(50)]
    assert {choice.instance_id for choice in choices if choice} == {"a", "b"}
    assert {choice.reason for choice in choices if choice} == {RouteReason.TIE}
