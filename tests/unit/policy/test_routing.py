from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from pdmux_ray.policy.decisions import RouteChoice, RouteReason, Unfit
from pdmux_ray.policy.routing import FitnessLimits, RouteAsk, choose_route, unfit
from pdmux_ray.policy.views import InstanceView
from pdmux_ray.types import RoutePolicy

from .routes import FITNESS, LIMITS, WELL, decode, decoding, mux, prefill, route

UNFIT = {
    Unfit.NO_LINE: replace(WELL, line_is_up=False),
    Unfit.SILENT: replace(WELL, silence_s=5.1),
    Unfit.STALLED: replace(WELL, step_age_s=56.0, silence_s=4.1),
    Unfit.AILING: replace(WELL, ailing=True),
    Unfit.LEAVING: replace(WELL, leaving=True),
}


def choose(*views: InstanceView, policy: RoutePolicy = "local", tokens: int = 100, **cached: int) -> RouteChoice:
    """Without a latency model."""
    return choose_route(RouteAsk(tokens, cached), views, replace(LIMITS, policy=policy), {}, Random(1))


def test_no_instance_no_choice() -> None:
    assert choose() == RouteChoice(None, RouteReason.NONE_LINKED)


@pytest.mark.parametrize("why", Unfit)
@pytest.mark.parametrize("policy", get_args(RoutePolicy))
def test_an_instance_that_is_not_fit_is_not_taken_even_when_it_is_the_only_one(why: Unfit, policy: RoutePolicy) -> None:
    assert unfit(UNFIT[why], FITNESS) is why
    assert choose(UNFIT[why], policy=policy) == RouteChoice(None, RouteReason.NONE_FIT)
    assert choose(UNFIT[why], mux("busy", running=64), policy=policy).instance_id == "busy"


@pytest.mark.parametrize("view", [replace(WELL, silence_s=5.0), replace(WELL, step_age_s=56.0, silence_s=4.0), WELL])
def test_an_instance_at_its_limits_is_fit(view: InstanceView) -> None:
    assert unfit(view, FITNESS) is None


def test_an_idle_instance_is_not_stalled_however_long_it_has_been_silent() -> None:
    assert unfit(replace(WELL, silence_s=100.0), FitnessLimits(silence_s=1000.0, stall_timeout_s=60.0)) is None


class TestByLoad:
    def test_a_single_instance_is_taken_however_loaded_it_is(self) -> None:
        assert choose(mux("a", running=64, waiting=200)) == RouteChoice("a", RouteReason.ONLY_ONE)

    def test_the_instance_with_the_fewest_requests_is_taken_whether_they_run_or_wait(self) -> None:
        views = [mux("a", running=3), mux("b", running=1, waiting=1), mux("c", waiting=4)]
        assert choose(*views, a=96) == RouteChoice("b", RouteReason.LEAST_LOADED)

    def test_requests_on_their_way_count_so_that_a_burst_does_not_go_to_one_instance(self) -> None:
        assert choose(mux("a", on_their_way=2), mux("b", running=1)) == RouteChoice("b", RouteReason.LEAST_LOADED)

    def test_among_equally_busy_instances_the_one_that_has_most_of_the_prompt_is_taken(self) -> None:
        views = [mux("a"), mux("b"), mux("c", running=1)]
        assert choose(*views, a=16, b=32, c=64) == RouteChoice("b", RouteReason.PREFIX)

    def test_among_equally_busy_instances_the_one_with_more_free_pages_is_taken(self) -> None:
        views = [mux("a", running=2, free_pages=10), mux("b", running=2, free_pages=90)]
        assert choose(*views) == RouteChoice("b", RouteReason.LEAST_LOADED)

    def test_equals_are_drawn_and_every_one_of_them_can_be(self) -> None:
        views = [mux("a"), mux("b"), mux("c", running=1)]
        rng = Random(7)
        limits = replace(LIMITS, policy="local")
        choices = [choose_route(RouteAsk(9, {}), views, limits, {}, rng) for _ in range(50)]
        assert {choice.instance_id for choice in choices} == {"a", "b"}
        assert {choice.reason for choice in choices} == {RouteReason.TIE}

    def test_who_only_prefills_is_given_no_request_while_another_can_take_it(self) -> None:
        assert choose(prefill("p"), mux("m", running=64)) == RouteChoice("m", RouteReason.ONLY_ONE)

    def test_prefill_instances_serve_all_of_a_request_when_nobody_else_can(self) -> None:
        assert choose(prefill("p"), mux("m", leaving=True)) == RouteChoice("p", RouteReason.NO_DECODE_FIT)


class TestByThreshold:
    @pytest.mark.parametrize(("tokens", "cached", "fetches"), [(256, 0, False), (257, 0, True), (257, 16, False)])
    def test_a_prompt_is_fetched_from_so_many_tokens_on_that_the_decode_instance_lacks(
        self, tokens: int, cached: int, fetches: bool
    ) -> None:
        choice = choose(prefill("p"), mux("m"), policy="threshold", tokens=tokens, m=cached)
        assert choice == RouteChoice("m", *((RouteReason.LONG, ("p",)) if fetches else (RouteReason.SHORT, ())))

    def test_without_a_prefill_instance_it_is_prefilled_where_it_decodes_and_the_reason_says_so(self) -> None:
        views = [prefill("p", ailing=True), mux("m")]
        assert choose(*views, policy="threshold", tokens=1000) == RouteChoice("m", RouteReason.NO_PREFILL_FIT)
        assert choose(*views, policy="threshold", tokens=10) == RouteChoice("m", RouteReason.SHORT)

    def test_an_instance_that_only_decodes_fetches_short_prompts_too(self) -> None:
        assert choose(prefill("p"), decode("d"), policy="threshold", tokens=10) == RouteChoice("d", RouteReason.ALWAYS, ("p",))

    def test_the_peer_with_the_least_to_compute_comes_first_and_another_stands_in_for_it(self) -> None:
        peers = [
            prefill("a", queued_prefill_tokens=500),
            prefill("b", queued_prefill_tokens=400, on_their_way_tokens=300),
            prefill("c", queued_prefill_tokens=800),
        ]
        assert choose(*peers, mux("m"), policy="threshold", tokens=1000, c=496).prefill == ("c", "a")


class TestAlways:
    def test_every_prompt_is_fetched(self) -> None:
        assert choose(prefill("p"), mux("m"), policy="remote", tokens=2) == RouteChoice("m", RouteReason.ALWAYS, ("p",))

    def test_but_not_what_is_there_already(self) -> None:
        choice = choose(prefill("p"), mux("m"), policy="remote", tokens=33, m=32)
        assert choice == RouteChoice("m", RouteReason.CACHED)

    def test_nor_from_nobody(self) -> None:
        assert choose(mux("m"), policy="remote") == RouteChoice("m", RouteReason.NO_PREFILL_FIT)


class TestByPrediction:
    def test_where_nobody_decodes_a_prompt_is_prefilled_where_it_will_be(self) -> None:
        choice = route(200, prefill("p"), mux("m"))
        assert (choice.instance_id, choice.reason, choice.prefill) == ("m", RouteReason.LOCAL, ())
        assert choice.predicted_ttft_s == pytest.approx(0.21)

    def test_beside_many_decodes_it_is_fetched_from_an_idle_prefill_instance(self) -> None:
        choice = route(1000, prefill("p"), mux("m", **decoding(40)))
        assert (choice.instance_id, choice.reason, choice.prefill) == ("m", RouteReason.REMOTE, ("p",))

    def test_but_not_when_that_one_has_too_much_to_do(self) -> None:
        assert route(400, prefill("p"), mux("m", **decoding(40))).prefill == ("p",)
        assert route(400, prefill("p", queued_prefill_tokens=3000), mux("m", **decoding(40))).prefill == ()
        assert route(400, prefill("p", on_their_way_tokens=3000), mux("m", **decoding(40))).prefill == ()

    def test_nor_over_a_link_that_takes_longer_than_prefilling(self) -> None:
        limits = replace(LIMITS, bandwidth=1e6)
        assert route(1000, prefill("p"), mux("m", **decoding(40)), limits=limits).prefill == ()

    def test_nor_when_the_prefix_is_where_it_decodes(self) -> None:
        choice = route(1000, prefill("p"), mux("m", **decoding(40)), cached={"m": 960})
        assert (choice.reason, choice.prefill) == (RouteReason.LOCAL, ())

    def test_the_prefill_instance_that_has_the_prefix_is_asked_and_another_stands_in(self) -> None:
        views = [*(prefill(name) for name in "pqr"), mux("m", **decoding(40))]
        choices = [route(1000, *views, cached={"q": 800}, seed=seed).prefill for seed in range(9)]
        assert {prefill[0] for prefill in choices} == {"q"}
        assert {len(prefill) for prefill in choices} == {2}

    def test_an_instance_that_only_decodes_fetches_what_it_lacks(self) -> None:
        assert route(50, prefill("p", queued_prefill_tokens=3000), decode("d")).prefill == ("p",)
        choice = route(49, prefill("p"), decode("d"), cached={"d": 48})
        assert (choice.reason, choice.prefill) == (RouteReason.CACHED, ())

    def test_without_a_prefill_instance_it_prefills_after_all_and_the_reason_says_so(self) -> None:
        for views in [(decode("d"),), (decode("d"), prefill("p", silence_s=9.0)), (mux("d"), prefill("p", leaving=True))]:
            choice = route(1000, *views)
            assert (choice.instance_id, choice.reason, choice.prefill) == ("d", RouteReason.NO_PREFILL_FIT, ())

    def test_a_prompt_that_would_hold_up_short_ones_for_too_long_is_fetched_however_late_it_is_then(self) -> None:
        views = [prefill("p", queued_prefill_tokens=9000), mux("m")]
        choice = route(1000, *views)
        assert (choice.instance_id, choice.reason, choice.prefill) == ("m", RouteReason.LATE, ("p",))
        assert route(800, *views).prefill == ()

    def test_but_not_where_there_is_nobody_to_fetch_it_from(self) -> None:
        choice = route(1000, mux("a", queued_prefill_tokens=900), mux("b"))
        assert (choice.instance_id, choice.reason) == ("b", RouteReason.LOCAL)

    def test_an_instance_whose_decodes_would_miss_their_objective_gets_no_more(self) -> None:
        views = [mux("full", **decoding(90)), mux("queue", queued_prefill_tokens=600)]
        assert {route(100, *views, seed=seed).instance_id for seed in range(9)} == {"queue"}

    def test_nor_one_without_pages_for_the_prompt(self) -> None:
        views = [mux("full", free_pages=6), mux("queue", queued_prefill_tokens=600)]
        assert {route(100, *views, seed=seed).instance_id for seed in range(9)} == {"queue"}
        assert route(100, *views, cached={"full": 32}).instance_id == "full"

    def test_a_prompt_that_is_late_anyhow_is_prefilled_where_it_delays_others_least(self) -> None:
        choice = route(2000, prefill("p", queued_prefill_tokens=9000), mux("m", **decoding(60)))
        assert (choice.reason, choice.prefill) == (RouteReason.LATE, ("p",))

    def test_of_ways_that_delay_others_alike_the_one_that_misses_an_objective_least_is_taken(self) -> None:
        choice = route(100, mux("a", queued_prefill_tokens=9000), mux("b", queued_prefill_tokens=5000))
        assert (choice.instance_id, choice.reason) == ("b", RouteReason.LATE)

    def test_without_a_latency_model_load_decides_and_the_reason_says_so(self) -> None:
        assert choose(prefill("p"), mux("m"), policy="predict", tokens=5000) == RouteChoice("m", RouteReason.NO_MODEL)
        assert choose(prefill("p"), decode("d"), policy="predict") == RouteChoice("d", RouteReason.NO_MODEL, ("p",))


class TestReach:
    def test_a_prompt_is_fetched_only_from_who_is_linked_to_the_instance_that_decodes(self) -> None:
        view = mux("m", peers=frozenset("q"), **decoding(40))
        peers = [prefill("p"), prefill("q", queued_prefill_tokens=100)]
        assert route(1000, *peers, view).prefill == ("q",)
        assert choose(*peers, view, policy="remote").prefill == ("q",)

    def test_who_only_decodes_and_is_linked_to_nobody_is_passed_over_while_there_is_another(self) -> None:
        alone, linked = decode("alone", peers=frozenset()), decode("linked", peers=frozenset("p"), **decoding(20))
        assert route(1000, prefill("p"), alone, linked).instance_id == "linked"
        assert choose(prefill("p"), alone, linked, policy="remote").instance_id == "linked"
        for choice in (route(1000, prefill("p"), alone), choose(prefill("p"), alone, policy="threshold")):
            assert (choice.instance_id, choice.reason, choice.prefill) == ("alone", RouteReason.NO_PREFILL_FIT, ())
