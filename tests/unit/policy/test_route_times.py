from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import RouteReason
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.policy.route_times import HANDOFF_S, SAFE
from pdmux_ray.policy.routing import NEAR, RouteAsk, RouteLimits, choose_route, unfit
from pdmux_ray.policy.views import InstanceCosts, InstanceView, Queued
from pdmux_ray.types import Role

from .routes import COSTS, FITNESS, LIMITS, NO_OBJECTIVES, costs_of, decode, decoding, mux, prefill, route, ways

CHUNKED = InstanceCosts(COSTS.model, 30, 1, one_pass_tokens=100)
COUNTS = (
    "running",
    "waiting",
    "on_their_way",
    "decode_batch",
    "decode_context_tokens",
    "queued_prefill_tokens",
    "on_their_way_tokens",
)
POLICIES = get_args(get_type_hints(RouteLimits)["policy"])


class TestTheFirstToken:
    def test_of_a_prefill_where_it_decodes_comes_after_all_that_is_queued_there(self) -> None:
        view = mux("m", queued_prefill_tokens=300, on_their_way_tokens=200)
        queue_s = 0.5 * 0.522 / 0.512  # at the pace of prompts of 512 tokens
        assert ways(RouteAsk(100, {}), view)["m", None].ttft_s == pytest.approx(queue_s + 0.11)

    def test_of_a_prefill_comes_after_the_prompts_that_are_due_before_it(self) -> None:
        """Due are: this one after 1.2 s, 300 tokens before, 500 after it, and 700 that are late let it pass."""
        queue = (Queued(0.5, 300), Queued(1.3, 500), Queued(-0.1, 700))
        view = mux("m", queued_prefill_tokens=1500, queue=queue)
        assert ways(RouteAsk(100, {}), view)["m", None].ttft_s == pytest.approx(0.31 + 0.11)

    def test_of_a_prefill_comes_after_what_nobody_knows_more_of_than_that_it_is_queued(self) -> None:
        view = mux("m", queued_prefill_tokens=812, queue=(Queued(0.5, 300),))
        assert ways(RouteAsk(100, {}), view)["m", None].ttft_s == pytest.approx(0.31 + 0.522 + 0.11)

    def test_of_a_prefill_in_one_pass_comes_after_all_that_came_before(self) -> None:
        view = mux("m", queued_prefill_tokens=200, queue=(Queued(9.0, 200),))
        assert ways(RouteAsk(100, {}), view, costs=CHUNKED)["m", None].ttft_s == pytest.approx(3 * 0.11)

    def test_of_a_prefill_gets_what_the_decodes_leave_of_the_objective(self) -> None:
        assert ways(RouteAsk(100, {}), mux("m", **decoding(40)))["m", None].ttft_s == pytest.approx(0.11 / 0.5)
        assert ways(RouteAsk(100, {}), mux("m", **decoding(400)))["m", None].ttft_s == pytest.approx(0.11 / 0.1)

    def test_of_a_prefill_in_one_pass_comes_with_the_last_of_its_chunks_which_decode_as_well(self) -> None:
        (way,) = ways(RouteAsk(250, {}), mux("m", queued_prefill_tokens=200, **decoding(40)), costs=CHUNKED).values()
        assert way.ttft_s == pytest.approx((2 + 3) * (0.1 + 0.05))

    def test_of_a_fetch_comes_a_layer_of_transfer_and_a_decode_step_after_the_prefill(self) -> None:
        way = ways(RouteAsk(1001, {}), prefill("p"), mux("m"))["m", "p"]
        assert way.ttft_s == pytest.approx(1.01 + 0.01 / 30 + HANDOFF_S + 0.011)

    def test_of_a_fetch_over_a_slow_link_comes_a_layer_of_prefill_and_a_decode_step_after_the_transfer(self) -> None:
        way = ways(RouteAsk(1001, {}), prefill("p"), mux("m"), limits=replace(LIMITS, bandwidth=1e6))["m", "p"]
        assert way.ttft_s == pytest.approx(10.0 + 1.01 / 30 + HANDOFF_S + 0.011)

    def test_of_a_fetch_comes_sooner_by_what_either_side_has_of_the_prompt(self) -> None:
        there = ways(RouteAsk(1001, {"p": 800}), prefill("p"), mux("m"))["m", "p"]
        assert there.ttft_s == pytest.approx(0.21 + 0.01 / 30 + HANDOFF_S + 0.011)
        here = ways(RouteAsk(1001, {"m": 800}), prefill("p"), mux("m"))["m", "p"]
        assert here.ttft_s == pytest.approx(1.01 + 0.002 / 30 + HANDOFF_S + 0.011)


def test_a_first_token_is_in_time_when_it_would_be_even_if_it_took_a_little_longer() -> None:
    allowed_s = LIMITS.ttft_s + 100 * LIMITS.ttft_s_per_token
    tokens = (allowed_s / SAFE - 0.11) / 0.522 * 512
    for queued, keeps in ((tokens - 10, True), (tokens + 10, False)):
        view = mux("m", queued_prefill_tokens=int(queued))
        assert ways(RouteAsk(100, {}), view)["m", None].keeps is keeps


class TestTheGap:
    def test_counts_all_who_will_decode_there(self) -> None:
        view = mux("m", running=10, decode_batch=4, waiting=3, on_their_way=2)
        assert ways(RouteAsk(10, {}), view)["m", None].gap_s == pytest.approx(0.010 + 0.016)

    def test_is_of_the_whole_pass_when_prompts_are_computed_in_one_with_the_decodes(self) -> None:
        view = mux("m", **decoding(10))
        found = ways(RouteAsk(1000, {}), prefill("p"), view, costs=replace(CHUNKED, one_pass_tokens=float("inf")))
        assert found["m", None].gap_s == pytest.approx(0.020 + 1.0)
        assert not found["m", None].keeps
        assert found["m", "p"].gap_s == pytest.approx(0.021)
        assert ways(RouteAsk(1000, {}), view, costs=CHUNKED)["m", None].gap_s == pytest.approx(0.020 + 0.1)

    def test_of_a_prefill_in_one_pass_hurts_nobody_where_nobody_decodes(self) -> None:
        assert ways(RouteAsk(1000, {}), mux("m"), costs=CHUNKED)["m", None].gap_s == pytest.approx(0.011)


def test_without_objectives_the_soonest_first_token_wins() -> None:
    assert route(5000, mux("a", queued_prefill_tokens=900), mux("b"), limits=NO_OBJECTIVES).instance_id == "b"


def test_a_burst_that_shares_a_prefix_begins_where_it_is_and_goes_on_elsewhere_too() -> None:
    views = {name: mux(name) for name in ("has", "b", "c")}
    rng, went = Random(3), []
    for _ in range(30):
        choice = choose_route(RouteAsk(800, {"has": 640}), list(views.values()), LIMITS, costs_of(*views.values()), rng)
        assert choice.instance_id is not None
        view = views[choice.instance_id]
        new = 160 if choice.instance_id == "has" else 800
        more = {"on_their_way": view.on_their_way + 1, "on_their_way_tokens": view.on_their_way_tokens + new}
        views[choice.instance_id] = replace(view, **more)  # type: ignore[arg-type]
        went.append(choice.instance_id)
    assert went[0] == went[1] == "has"
    assert {"b", "c"} <= set(went)


# Properties.

numbers = st.integers(0, 40)


@st.composite
def instances(draw: st.DrawFn, name: str) -> InstanceView:
    figures = {count: draw(numbers) * (50 if count.endswith("tokens") else 1) for count in COUNTS}
    flaw = draw(st.sampled_from(({}, {}, {}, {"ailing": True}, {"leaving": True}, {"silence_s": 9.0}, {"line_is_up": False})))
    peers = draw(st.none() | st.frozensets(st.sampled_from("abcd")))
    role, free_pages = draw(st.sampled_from(Role)), draw(st.integers(0, 200))
    return replace(mux(name), role=role, free_pages=free_pages, peers=peers, **figures, **flaw)


@st.composite
def fleets(draw: st.DrawFn) -> list[InstanceView]:
    return [draw(instances(name)) for name in "abcd"[: draw(st.integers(0, 4))]]


@st.composite
def asks(draw: st.DrawFn) -> RouteAsk:
    tokens = draw(st.integers(1, 3000))
    return RouteAsk(tokens, draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, tokens // 16).map(lambda n: 16 * n))))


limits = st.builds(
    replace,
    st.sampled_from((LIMITS, NO_OBJECTIVES)),
    policy=st.sampled_from(POLICIES),
    threshold_tokens=st.integers(1, 3000),
    bandwidth=st.floats(1e5, 1e10),
)
costs = st.builds(
    InstanceCosts,
    st.builds(FakeCosts, st.just(4), guard=st.floats(1.0, 1.5), knee=st.integers(1, 4)),
    st.just(30),
    st.just(4),
    st.sampled_from((None, 512.0, float("inf"))),
)


@given(fleets(), asks(), limits, costs, st.integers(0, 9), st.booleans())
def test_a_route_is_one_that_can_be_taken(
    views: list[InstanceView], ask: RouteAsk, limits: RouteLimits, costs: InstanceCosts, seed: int, modelled: bool
) -> None:
    models = costs_of(*views, costs=costs) if modelled else {}
    choice = choose_route(ask, views, limits, models, Random(seed))
    fit = {view.instance_id: view for view in views if unfit(view, FITNESS) is None}
    assert (choice.instance_id is None) == (not fit)
    if choice.instance_id is None:
        assert choice.reason in (RouteReason.NONE_FIT, RouteReason.NONE_LINKED)
        assert not choice.prefill
        return
    taken = fit[choice.instance_id]
    assert taken.role is not Role.PREFILL or choice.reason is RouteReason.NO_DECODE_FIT
    peers = {name for name, view in fit.items() if view.role is Role.PREFILL and taken.reaches(view)}
    assert set(choice.prefill) <= peers - {choice.instance_id}
    assert len(set(choice.prefill)) == len(choice.prefill)
    if taken.role is Role.DECODE and peers and ask.to_fetch(choice.instance_id) and limits.policy != "local":
        assert choice.prefill
    if limits.policy == "remote" and not choice.prefill:
        assert choice.reason in (RouteReason.NO_PREFILL_FIT, RouteReason.CACHED, RouteReason.NO_DECODE_FIT)
    assert (choice.predicted_ttft_s is not None) == (
        modelled and limits.policy == "predict" and choice.reason is not RouteReason.NO_DECODE_FIT
    )


@given(fleets(), asks(), costs, st.integers(0, 9))
def test_nothing_that_keeps_the_objectives_is_much_cheaper_and_a_late_prompt_delays_others_least(
    views: list[InstanceView], ask: RouteAsk, costs: InstanceCosts, seed: int
) -> None:
    choice = choose_route(ask, views, LIMITS, costs_of(*views, costs=costs), Random(seed))
    if choice.instance_id is None or choice.reason is RouteReason.NO_DECODE_FIT:
        return
    found = ways(ask, *views, costs=costs)
    taken = found[choice.instance_id, choice.prefill[0] if choice.prefill else None]
    free = [way for way in found.values() if way.bearable] or list(found.values())
    keeping = [way for way in free if way.keeps]
    assert taken.keeps == bool(keeping)
    if keeping:
        assert taken.cost <= (1 + NEAR) * min(way.cost for way in keeping)
    else:
        assert taken.prefill_s <= (1 + NEAR) * min(way.prefill_s for way in free)
    assert (choice.reason is RouteReason.LATE) <= (not keeping)


@given(fleets().filter(bool), asks(), limits, costs, st.data())
def test_no_way_becomes_more_attractive_by_load(
    views: list[InstanceView], ask: RouteAsk, limits: RouteLimits, costs: InstanceCosts, data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, len(views) - 1))
    name = data.draw(st.sampled_from((*COUNTS, "free_pages")))
    more = getattr(views[where], name) + (-1 if name == "free_pages" else 1) * data.draw(st.integers(1, 1000))
    loaded = [*views[:where], replace(views[where], **{name: max(more, 0)}), *views[where + 1 :]]
    before, after = ways(ask, *views, limits=limits, costs=costs), ways(ask, *loaded, limits=limits, costs=costs)
    assert before.keys() == after.keys()
    for way, then in before.items():
        now = after[way]
        assert now.cost >= then.cost - 1e-9
        assert now.ttft_s >= then.ttft_s - 1e-9
        assert now.prefill_s >= then.prefill_s - 1e-9
        assert now.keeps <= then.keeps
        assert now.bearable <= then.bearable
        if views[where].instance_id not in way:
            assert now == then


def test_every_count_of_an_instance_is_looked_at_by_the_properties() -> None:
    counts = {field.name for field in fields(InstanceView) if field.type == "int"}
    assert counts == {*COUNTS, "free_pages"}


def test_an_instance_that_only_decodes_has_no_other_way_than_to_fetch() -> None:
    assert ways(RouteAsk(100, {}), prefill("p"), decode("d")).keys() == {("d", "p")}
    assert ways(RouteAsk(100, {}), decode("d")).keys() == {("d", None)}
