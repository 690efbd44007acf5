"""The placement controller in the simulator: what it does there, and that it is the served one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdmux_ray.config import AppConfig
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.metrics.prometheus import Series
from pdmux_ray.policy.decisions import PlacementPlan
from pdmux_ray.policy.decisions import PlacementReason as Why
from pdmux_ray.policy.demand import FleetFigures
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.serve.placer import Placer
from pdmux_ray.serve.sources import (
    CONTEXT,
    DECODING,
    FINISHED,
    GENERATED,
    PREFILL,
    QUEUED,
    RUNNING,
    WAITING,
    fleet_figures,
)
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.sim.placement import Look
from pdmux_ray.types import Role
from pdmux_ray.workload.requests import PlannedRequest
from tests.unit.sim.fleets import LAYERS, UNITS, config, device, requests

# So slow that few steps make a busy fleet: half a second for a long prompt, a tenth for a step of four.
SLOW = FakeCosts(UNITS, LAYERS, fixed_s=0.0, weights_s=0.1, request_s=0.0, context_s=0.0, token_s=5e-3, pair_s=0.0)
TURN_S = 30.0


def settings(**placement: object) -> AppConfig:
    app = config(3, 0, 1, "remote", mode="chunked", max_batch=4, prefix_cache=False)
    placed = app.placement.model_copy(update={"enabled": True, "cool_down_s": 5.0, "confirm_s": 3.0, **placement})
    return app.model_copy(update={"placement": placed})


def turning() -> list[PlannedRequest]:
    """Long prompts, 4 a second, whose prefills take half a second; then answers of 40 tokens, 2 a second."""
    long_in = [(index / 4, 100, 1) for index in range(int(4 * TURN_S))]
    return requests(*long_in, *((TURN_S + index / 2, 8, 40) for index in range(60)))


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(settings(), device(SLOW), turning(), spread=0.0)


def prefills(looks: Sequence[Look]) -> list[int]:
    return [sum(each.role is Role.PREFILL for each in look.seen) for look in looks]


def test_roles_change_when_the_load_turns_and_not_before(run: Run) -> None:
    before = [look for look in run.looks if look.time_s < TURN_S + 1]
    assert set(prefills(before)) == {3}
    assert prefills(run.looks)[-1] == 1
    changes = [look.plan.reason for look in run.looks if look.plan.changes]
    assert set(changes) == {Why.MORE_DECODE}


def test_no_request_is_lost_by_a_change(run: Run) -> None:
    assert {lifeline.ending for lifeline in run.lifelines} == {Ending.COMPLETE}


def test_when_the_mix_shifts_answers_are_done_sooner_than_with_roles_that_stay(run: Run) -> None:
    """Row 46. The one instance that decodes at first has work for twice as long as the long answers take to come."""
    stays = simulate(settings(enabled=False), device(SLOW), turning(), spread=0.0)
    placed_s, stays_s = (max(lifeline.ended_s for lifeline in each.lifelines) - TURN_S for each in (run, stays))
    assert placed_s < 0.75 * stays_s


def test_in_dry_run_no_role_changes() -> None:
    looks = simulate(settings(dry_run=True), device(SLOW), turning()[-80:], spread=0.0).looks
    assert set(prefills(looks)) == {3}
    assert any(look.plan.changes for look in looks)


def by_the_rules(figures: FleetFigures) -> list[Series]:
    """As Prometheus has them."""
    rates = {PREFILL: figures.prefill_tokens_per_s, GENERATED: figures.generated_tokens_per_s, FINISHED: figures.finished_per_s}
    of_all = {DECODING: figures.decoding, CONTEXT: figures.decode_context_tokens, QUEUED: figures.queued_prefill_tokens}
    served = {RUNNING: figures.running, WAITING: figures.waiting}
    named: list[tuple[str, dict[str, str], float]] = [(name, {}, value) for name, value in rates.items()]
    named += [(name, {"role": "prefill"}, value) for name, value in of_all.items()]
    named += [(name, {"role": "decode"}, value) for name, value in served.items()]
    return [Series({"__name__": name, **labels}, ((0.0, value),)) for name, labels, value in named]


@pytest.mark.parametrize("source", ["direct", "prometheus"])
def test_the_served_controller_decides_as_the_simulated_one_on_the_same_series(run: Run, source: str) -> None:
    placer = Placer(settings(), SLOW, run.looks[0].time_s)
    again: list[PlacementPlan] = []
    for look in run.looks:
        figures = look.figures
        if figures is not None and source == "prometheus":
            figures = fleet_figures(by_the_rules(figures), figures.taken_s)
        again.append(placer.look(look.time_s, look.seen, figures))
    assert again == [look.plan for look in run.looks]
