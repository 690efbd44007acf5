from __future__ import annotations

import logging
from typing import Any

import pytest

from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.metrics.catalog import CATALOG, Component
from pdmux_ray.policy.decisions import PlacementReason as Why
from pdmux_ray.policy.demand import FleetFigures
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.serve.placer import PATIENCE_S, THERE_S, Placer, Seen
from pdmux_ray.types import Load, Role

COSTS = FakeCosts(units=8, layers=4, weights_s=0.01)
LATER_S = 1000.0  # long after its begin
QUIET = FleetFigures(LATER_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
DECODES = FleetFigures(LATER_S, 0.0, 1000.0, 1.0, 0.0, 128.0, 1280.0, 128.0, 0.0)  # two full batches


def config(**placement: Any) -> AppConfig:
    topology = {"prefill": 2, "decode": 1}
    return parse_app_config({"topology": topology, "placement": {"enabled": True, "confirm_s": 0, **placement}})


def seen(roles: str, **fields: Any) -> list[Seen]:
    """`roles`: the initials of an instance each."""
    names = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MUX}
    load = Load(0, 0, 1000, 1000, 0, 0.0)
    return [
        Seen(f"i{rank}", rank, names[letter], load, LATER_S, COSTS.layers, COSTS.units, True, **fields)
        for rank, letter in enumerate(roles)
    ]


def counts(placer: Placer, state: str) -> dict[str, float]:
    found = placer.figures(LATER_S)["pdmux_placement_instances"]
    assert isinstance(found, dict)
    return {role: count for (role, its), count in found.items() if its == state}


def test_planned_requested_and_observed_are_kept_apart() -> None:
    placer = Placer(config(), COSTS, 0.0)
    plan = placer.look(LATER_S, seen("ppd"), DECODES)
    assert plan.changes == (("i0", Role.DECODE),)
    assert counts(placer, "planned") == {"mux": 0, "prefill": 1, "decode": 2}
    assert counts(placer, "requested") == {"mux": 0, "prefill": 1, "decode": 2}
    assert counts(placer, "observed") == {"mux": 0, "prefill": 2, "decode": 1}
    assert placer.look(LATER_S + 1, seen("ppd"), DECODES).reason is Why.PENDING
    assert placer.look(LATER_S + 2, seen("dpd"), DECODES).reason is Why.BALANCED
    assert counts(placer, "observed") == {"mux": 0, "prefill": 1, "decode": 2}


def test_an_instance_that_does_not_take_its_role_is_waited_for_only_so_long() -> None:
    placer = Placer(config(cool_down_s=0), COSTS, 0.0)
    placer.look(LATER_S, seen("ppd"), DECODES)
    again = placer.look(LATER_S + PATIENCE_S, seen("ppd"), DECODES)
    assert (again.reason, again.changes) == (Why.MORE_DECODE, (("i0", Role.DECODE),))
    placer.refused("i0")
    assert placer.look(LATER_S + PATIENCE_S + 1, seen("ppd"), DECODES).reason is Why.MORE_DECODE


def test_one_that_begins_anew_goes_on_from_the_roles_that_there_are_and_waits_first() -> None:
    """Whatever the topology says, and whatever the one before it has just done."""
    placer = Placer(config(), COSTS, LATER_S - 1)
    assert placer.look(LATER_S, seen("dpd"), DECODES).reason is Why.BALANCED
    assert placer.look(LATER_S, seen("ppd"), DECODES).reason is Why.COOLING


def test_in_dry_run_it_plans_and_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    placer = Placer(config(dry_run=True), COSTS, 0.0)
    with caplog.at_level(logging.INFO):
        placer.look(LATER_S, seen("ppd"), DECODES)
    assert counts(placer, "planned")["decode"] == 2
    assert counts(placer, "requested")["decode"] == 1
    assert "would give new roles: i0 decode" in caplog.text


@pytest.mark.parametrize("pin", ["1", "i1"], ids=["rank", "id"])
def test_a_pin_names_an_instance_by_its_rank_or_the_beginning_of_its_id(pin: str) -> None:
    placer = Placer(config(pinned={pin: "prefill"}), COSTS, 0.0)
    assert placer.look(LATER_S, seen("pdd"), QUIET).changes == (("i1", Role.PREFILL),)


def test_a_pin_by_an_id_that_nobody_has_is_a_metric_and_said_once_when_all_had_time_to_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    placer = Placer(config(pinned={"i1": "prefill", "old": "prefill", "2": "decode"}), COSTS, 0.0)
    told = []
    for now in (1.0, THERE_S, THERE_S + 1):
        placer.look(now, seen("ppd"), QUIET)
        told.append(placer.figures(now)["pdmux_placement_idle_pins"])
    assert told == [0.0, 1.0, 1.0]
    assert [record.getMessage() for record in caplog.records if "begins with" in record.getMessage()] == [
        "Placement: no instance's id begins with 'old', so this pin holds nobody: `pdmux role` lists the ids, and a rank (the "
        "first instance's is 0) outlives a start"
    ]


def test_missing_figures_are_a_metric_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    placer = Placer(config(), COSTS, 0.0)
    placer.look(LATER_S, seen("ppd"), QUIET)
    assert placer.figures(LATER_S)["pdmux_placement_stale"] == 0.0
    for second in range(1, 4):
        assert placer.look(LATER_S + second, seen("ppd"), None).reason is Why.STALE
    assert placer.figures(LATER_S + 30)["pdmux_placement_stale"] == 1.0
    assert placer.figures(LATER_S + 30)["pdmux_placement_age_seconds"] == 30.0
    assert caplog.text.count("no role changes") == 1


@pytest.mark.parametrize("roles", ["p", "ppd"])
def test_figures_are_stale_whatever_else_keeps_it_from_acting_and_also_when_it_looks_no_more(roles: str) -> None:
    placer = Placer(config(), COSTS, 0.0)
    placer.look(LATER_S + 30, seen(roles), QUIET)
    assert placer.figures(LATER_S + 30)["pdmux_placement_stale"] == 1.0
    placer.look(LATER_S, seen(roles), QUIET)
    assert [placer.figures(LATER_S + age)["pdmux_placement_stale"] for age in (0, 15, 16)] == [0.0, 0.0, 1.0]


def test_in_dry_run_what_it_plans_stays_to_be_seen_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    placer = Placer(config(dry_run=True, confirm_s=5), COSTS, 0.0)
    with caplog.at_level(logging.INFO):
        for second in range(14):
            placer.look(LATER_S + second, seen("ppd"), DECODES)
            assert counts(placer, "planned")["decode"] == 2
    assert caplog.text.count("would give") == 1


def test_every_metric_of_the_controller_is_told_and_every_one_told_is_in_the_catalog() -> None:
    placer = Placer(config(replicas={"min": 2, "max": 6}), COSTS, 0.0)
    placer.look(LATER_S, seen("ppd"), DECODES)
    assert set(placer.figures(LATER_S)) == {name for name, its in CATALOG.items() if its.component is Component.CONTROLLER}


def test_every_reason_is_a_series_from_the_begin() -> None:
    decisions = Placer(config(), COSTS, 0.0).figures(0.0)["pdmux_placement_decisions_total"]
    assert isinstance(decisions, dict)
    assert decisions == dict.fromkeys([reason.value for reason in Why], 0.0)


def test_the_number_of_instances_stays_the_last_one_known_while_figures_are_missing() -> None:
    placer = Placer(config(replicas={"min": 2, "max": 6}), COSTS, 0.0)
    placer.look(LATER_S, seen("ppd"), DECODES)
    assert placer.replicas == 5
    placer.look(LATER_S + 1, seen("ppd"), None)
    assert placer.replicas == 5


def test_in_dry_run_nobody_is_told_another_number_of_instances_but_the_metric_has_it() -> None:
    placer = Placer(config(dry_run=True, replicas={"min": 2, "max": 6}), COSTS, 0.0)
    placer.look(LATER_S, seen("ppd"), DECODES)
    assert placer.replicas is None
    assert placer.figures(LATER_S)["pdmux_placement_replicas"] == 5.0


def test_an_instance_whose_role_is_not_known_yet_is_not_placed() -> None:
    placer = Placer(config(), COSTS, 0.0)
    new = Seen("new", 3, None, None, 0.0, COSTS.layers, COSTS.units, False)
    assert [name for name, _ in placer.look(LATER_S, [*seen("ppd"), new], QUIET).roles] == ["i0", "i1", "i2"]
