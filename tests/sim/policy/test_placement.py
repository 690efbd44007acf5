from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.policy.decisions import PlacementPlan
from pdmux_ray.policy.decisions import PlacementReason as Why
from pdmux_ray.policy.demand import Demand
from pdmux_ray.policy.placement import (
    Bounds,
    PlacedInstance,
    PlacementLimits,
    PlacementMemory,
    PlacementView,
    place,
)
from pdmux_ray.types import Role

P, D, M = Role.PREFILL, Role.DECODE, Role.MUX
LIMITS = PlacementLimits(
    prefill=Bounds(1),
    decode=Bounds(1),
    decode_role=D,
    replicas=None,
    busy=0.6,
    margin=0.2,
    confirm_s=5.0,
    cool_down_s=20.0,
    stale_s=15.0,
)
LONG_AGO = PlacementMemory(changed_s=-1e6)
roles = st.sampled_from([P, D, M])
loads = st.floats(0, 8)


def fleet(prefill: int, decode: int) -> list[PlacedInstance]:
    return [PlacedInstance(f"{index}", P if index < prefill else D) for index in range(prefill + decode)]


class Controller:
    """A fleet that takes every role it is given at once, and is looked at once a second."""

    def __init__(self, instances: Sequence[PlacedInstance], limits: PlacementLimits = LIMITS) -> None:
        self.instances = list(instances)
        self.limits = limits
        self.memory = LONG_AGO
        self.now = 0.0
        self.reasons: list[Why] = []

    def look(self, prefill: float, decode: float, seconds: float = 1.0, age_s: float = 0.0) -> PlacementPlan:
        """At this demand, for so long; the last plan."""
        for _ in range(max(int(seconds), 1)):
            view = PlacementView(self.now, self.instances, Demand(self.now - age_s, prefill, decode))
            plan, self.memory = place(view, self.memory, self.limits)
            self.reasons.append(plan.reason)
            new = dict(plan.changes)
            self.instances = [replace(each, role=new.get(each.instance_id, each.role)) for each in self.instances]
            self.now += 1.0
        return plan

    @property
    def prefill(self) -> int:
        return sum(each.role is P for each in self.instances)

    @property
    def flips(self) -> int:
        return sum(reason in (Why.MORE_PREFILL, Why.MORE_DECODE) for reason in self.reasons)


def test_a_load_that_turns_from_long_prompts_to_long_answers_changes_the_ratio_once() -> None:
    found = Controller(fleet(3, 1))
    found.look(2.2, 0.4, seconds=60)
    assert (found.prefill, found.flips) == (3, 0)
    found.look(0.3, 2.3, seconds=60)
    assert (found.prefill, found.flips) == (1, 1)
    found.look(2.2, 0.4, seconds=60)
    assert (found.prefill, found.flips) == (3, 2)


def test_it_changes_before_the_busy_side_is_full() -> None:
    found = Controller(fleet(3, 1))
    found.look(0.5, 0.8, seconds=10)
    assert (found.prefill, found.reasons[-1]) == (2, Why.CALM)


def test_a_change_waits_until_it_is_confirmed_without_a_break() -> None:
    found = Controller(fleet(3, 1))
    found.look(0.3, 2.0, seconds=4)
    found.look(2.2, 0.3)
    found.look(0.3, 2.0, seconds=4)
    assert (found.flips, found.reasons[-1]) == (0, Why.CONFIRMING)
    found.look(0.3, 2.0, seconds=3)
    assert found.flips == 1


def test_a_change_that_waits_is_planned_already() -> None:
    plan = Controller(fleet(3, 1)).look(0.3, 2.0)
    assert (plan.reason, plan.changes) == (Why.CONFIRMING, ())
    assert [role for _, role in plan.roles] == [D, D, P, D]


def test_where_all_are_pinned_to_prefill_nothing_is_said_to_change() -> None:
    """Their number is the operator's wish, or who decodes is just away."""
    found = Controller([replace(each, pinned=P) for each in fleet(2, 0)])
    plan = found.look(3.0, 3.0, seconds=30)
    assert (plan.reason, plan.changes, found.flips) == (Why.BALANCED, (), 0)


@pytest.mark.parametrize("count", [1, 4], ids=["few", "enough"])
def test_how_many_instances_there_should_be_is_not_said_by_stale_figures(count: int) -> None:
    found = Controller(fleet(1, count - 1), replace(LIMITS, replicas=Bounds(1, 8)))
    assert found.look(3.0, 3.0, age_s=LIMITS.stale_s + 1).replicas is None


def test_a_change_waits_for_the_last_one_to_be_some_time_ago() -> None:
    found = Controller(fleet(3, 1))
    found.look(0.3, 2.0, seconds=6)
    found.look(2.2, 0.3, seconds=LIMITS.cool_down_s - 2)
    assert (found.flips, found.reasons[-1]) == (1, Why.COOLING)
    found.look(2.2, 0.3, seconds=3)
    assert found.flips == 2


def test_a_fleet_that_is_not_busy_is_left_alone() -> None:
    assert Controller(fleet(3, 1)).look(0.0, 0.5, seconds=60).reason is Why.CALM


@given(st.integers(2, 8), st.data(), loads, loads, st.integers(0, 2**16))
def test_at_a_constant_load_with_noise_roles_change_once_at_most(
    count: int, data: st.DataObject, prefill: float, decode: float, seed: int
) -> None:
    """Noise of half the margin, drawn anew at every look for ten minutes."""
    rng, found = random.Random(seed), Controller(fleet(data.draw(st.integers(1, count - 1)), 0))
    found.instances = fleet(found.prefill, count - found.prefill)
    for _ in range(600):
        near = [load * rng.uniform(1 - LIMITS.margin / 2.5, 1 + LIMITS.margin / 2.5) for load in (prefill, decode)]
        found.look(*near)
    assert found.flips <= 1


@pytest.mark.parametrize("rate", [0.5, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_at_a_tie_of_two_ratios_the_chance_of_arrivals_changes_roles_once_at_most(rate: float, seed: int) -> None:
    """Poisson arrivals, seen over 15 s, whose answers take 13 s; each of three instances would be busy for 60 % of the time."""
    rng, found = random.Random(seed), Controller(fleet(1, 2))
    comes_s = sorted(rng.uniform(0, 300) for _ in range(int(300 * rate)))
    for now in range(15, 300):
        seen = sum(now - 15 < at <= now for at in comes_s) / (15 * rate)
        decoding = sum(now - 13 < at <= now for at in comes_s) / (13 * rate)
        found.look(0.9 * seen, 0.9 * decoding)
    assert found.flips <= 1


@given(st.integers(2, 8), loads, loads, st.integers(1, 7))
def test_after_a_change_no_other_ratio_is_better_by_the_margin(count: int, prefill: float, decode: float, begin: int) -> None:
    found = Controller(fleet(min(begin, count - 1), max(count - begin, 1)))
    found.look(prefill, decode, seconds=30)
    assert found.reasons[-1] in (Why.CALM, Why.BALANCED)


@pytest.mark.parametrize("age_s", [LIMITS.stale_s + 1, 1e9])
def test_stale_figures_do_nothing_and_begin_the_confirmation_anew(age_s: float) -> None:
    found = Controller(fleet(3, 1))
    found.look(0.3, 2.0, seconds=4)
    assert found.look(0.3, 2.0, age_s=age_s).reason is Why.STALE
    assert found.look(0.3, 2.0, seconds=4).reason is Why.CONFIRMING


@given(st.lists(st.tuples(roles, st.booleans()), min_size=2, max_size=6))
def test_without_figures_only_pins_and_bounds_move_anything(given_: list[tuple[Role, bool]]) -> None:
    instances = [PlacedInstance(str(index), role, fit=fit) for index, (role, fit) in enumerate(given_)]
    plan, _ = place(PlacementView(0.0, instances, None), LONG_AGO, replace(LIMITS, confirm_s=0.0))
    assert plan.reason in (Why.STALE, Why.FEW, Why.BOUNDS)
    assert bool(plan.changes) is (plan.reason is Why.BOUNDS)
    assert plan.replicas is None


def test_a_role_that_was_asked_for_is_waited_for() -> None:
    instances = [replace(fleet(3, 1)[0], requested=D), *fleet(3, 1)[1:]]
    plan, _ = place(PlacementView(0.0, instances, Demand(0.0, 0.1, 3.0)), LONG_AGO, LIMITS)
    assert (plan.reason, plan.changes, dict(plan.roles)["0"]) == (Why.PENDING, (), D)


def test_a_pin_is_kept_at_once_and_held_whatever_comes() -> None:
    found = Controller([replace(each, pinned=P) if each.instance_id == "3" else each for each in fleet(2, 2)])
    assert found.look(0.1, 3.0).changes == (("3", P),)
    found.look(0.1, 3.0, seconds=60)
    assert [each.instance_id for each in found.instances if each.role is P] == ["3"]


def test_bounds_are_kept_whatever_the_load_is() -> None:
    found = Controller(fleet(3, 1), replace(LIMITS, prefill=Bounds(2, 3), decode=Bounds(1)))
    found.look(0.0, 4.0, seconds=60)
    assert found.prefill == 2
    outside = Controller(fleet(0, 4), replace(LIMITS, prefill=Bounds(1, 1)))
    outside.look(0.0, 0.0, seconds=6)
    assert (outside.prefill, outside.reasons[-1]) == (1, Why.BOUNDS)


def test_a_fleet_that_is_only_half_there_is_given_time_to_come() -> None:
    """When a controller begins with its instances, those that decode may come last."""
    found = Controller(fleet(2, 0))
    found.memory = PlacementMemory(0.0)
    assert found.look(0.0, 0.0, seconds=LIMITS.cool_down_s - 1).reason is Why.COOLING
    found.instances = fleet(2, 1)
    assert found.look(0.0, 0.0).reason is Why.CALM


def test_those_with_the_fewest_requests_change() -> None:
    busy = {"a": 5, "b": 1, "c": 3}
    found = Controller([*(PlacedInstance(name, P, requests) for name, requests in busy.items()), PlacedInstance("d", D)])
    found.look(1.0, 1.0, seconds=6)
    assert [each.instance_id for each in found.instances if each.role is P] == ["a", "c"]


@given(st.lists(st.tuples(roles, st.booleans(), st.none() | roles), min_size=1, max_size=6), loads, loads)
def test_somebody_fit_goes_on_decoding_and_nobody_unfit_is_touched(
    given_: list[tuple[Role, bool, Role | None]], prefill: float, decode: float
) -> None:
    instances = [PlacedInstance(str(i), role, fit=fit, pinned=pin) for i, (role, fit, pin) in enumerate(given_)]
    plan, _ = place(PlacementView(0.0, instances, Demand(0.0, prefill, decode)), LONG_AGO, replace(LIMITS, confirm_s=0.0))
    after, fit = dict(plan.roles), [each for each in instances if each.fit]
    assert not {name for name, _ in plan.changes} & {each.instance_id for each in instances if not each.fit}
    if plan.reason in (Why.MORE_PREFILL, Why.MORE_DECODE, Why.BOUNDS) and any(each.pinned is not P for each in fit):
        assert any(after[each.instance_id] is not P for each in fit)


@pytest.mark.parametrize(
    ("prefill", "decode", "replicas"),
    [(0.1, 0.1, 2), (0.45, 0.45, 2), (0.5, 0.5, 4), (1.1, 1.1, 4), (9.0, 9.0, 8)],
    ids=["as few as allowed", "fewer", "not fewer, for the margin", "as there are", "as many as allowed"],
)
def test_there_are_as_many_instances_as_keep_the_busy_side_from_being_full(
    prefill: float, decode: float, replicas: int
) -> None:
    plan = Controller(fleet(2, 2), replace(LIMITS, replicas=Bounds(2, 8))).look(prefill, decode)
    assert plan.replicas == replicas
