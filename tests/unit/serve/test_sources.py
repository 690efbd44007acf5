from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdmux_ray.metrics.fake_prometheus import FakePrometheus
from pdmux_ray.metrics.prometheus import PrometheusError
from pdmux_ray.metrics.rules import rules
from pdmux_ray.serve.placer import Seen
from pdmux_ray.serve.sources import (
    CONTEXT,
    DECODING,
    FINISHED,
    GENERATED,
    INSTANCES,
    LEAST_S,
    PREFILL,
    QUEUED,
    RULES,
    RUNNING,
    WAITING,
    WINDOW_S,
    PrometheusSource,
    Window,
)
from pdmux_ray.types import Load, Role


def instance(
    name: str, role: Role, *, prefilled: float = 0, generated: float = 0, finished: float = 0, now: float = 0.0, **load: int
) -> Seen:
    base = {"running": 0, "waiting": 0, "free_pages": 10, "total_pages": 10, "steps": 0, "step_age_s": 0.0}
    figures: dict[str, Any] = {
        "pdmux_prefill_tokens_total": prefilled,
        "pdmux_engine_generated_tokens_total": generated,
        "pdmux_engine_finished_total": {"stop": finished, "length": 0.0},
    }
    return Seen(name, 0, role, Load(**(base | load)), now, 8, 8, True, figures)  # type: ignore[arg-type]


def test_rates_are_what_the_instances_did_in_the_window() -> None:
    window = Window()
    for second in range(31):
        work = 100 * second if second <= 15 else 1500 + 1000 * (second - 15)
        found = window.take(float(second), [instance("a", Role.PREFILL, prefilled=work, finished=2 * second)])
    assert found is not None
    assert [found.prefill_tokens_per_s, found.finished_per_s] == pytest.approx([1000.0, 2.0])


def test_there_are_no_rates_before_there_was_time_for_them() -> None:
    window = Window()
    found = [window.take(float(second), [instance("a", Role.MUX, generated=second)]) for second in range(7)]
    assert [each is not None for each in found] == [second >= LEAST_S for second in range(7)]


def test_what_an_instance_did_before_it_came_does_not_count_nor_does_its_end() -> None:
    window = Window()
    old = [instance("a", Role.MUX, generated=1000.0)]
    for second in range(int(WINDOW_S) + 1):
        there = [*old, instance("b", Role.MUX, generated=9e9)] if second in (5, 6) else old
        found = window.take(float(second), there)
    assert found is not None
    assert found.generated_tokens_per_s == 0.0


def test_what_an_instance_computes_counts_while_it_can_be_given_no_requests() -> None:
    window = Window()
    for second in range(int(WINDOW_S) + 1):
        one, two = (instance(name, Role.MUX, generated=100.0 * second) for name in "ab")
        found = window.take(float(second), [one, replace(two, fit=not 4 <= second <= 6)])
    assert found is not None
    assert found.generated_tokens_per_s == pytest.approx(200.0)


def test_an_instance_that_has_not_told_its_figures_yet_has_done_nothing_that_counts() -> None:
    """Its line is up a second before them."""
    window = Window()
    for second in range(int(WINDOW_S) + 1):
        new = instance("a", Role.MUX, generated=9e9)
        found = window.take(float(second), [new if second > 2 else replace(new, figures={})])
    assert found is not None
    assert found.generated_tokens_per_s == 0.0


def test_requests_that_hold_pages_or_wait_are_those_of_instances_that_do_not_only_prefill() -> None:
    window, fleet = Window(), []
    for second in range(6):
        fleet = [
            instance("p", Role.PREFILL, running=3, waiting=2, queued_prefill_tokens=700, now=second),
            instance("d", Role.DECODE, running=5, waiting=1, decoding=4, decode_context_tokens=400, now=second - 0.5),
        ]
        found = window.take(float(second), fleet)
    assert found is not None
    assert (found.running, found.waiting, found.decoding) == (5, 1, 4)
    assert (found.queued_prefill_tokens, found.decode_context_tokens) == (700, 400)
    assert found.taken_s == 4.5, "the oldest word"


def test_without_a_fit_instance_there_are_no_figures() -> None:
    assert Window().take(0.0, []) is None


def series(name: str, value: float, role: Role | None = None) -> tuple[dict[str, str], float]:
    return {"__name__": name, "app": "pdmux"} | ({"role": role.value} if role else {}), value


COMPLETE = [
    *(series(name, value) for name, value in ((PREFILL, 100.0), (GENERATED, 50.0), (FINISHED, 2.0))),
    *(series(name, 4.0, role) for name in (RUNNING, WAITING, DECODING, CONTEXT, QUEUED) for role in Role),
    series(INSTANCES, 1.0, Role.PREFILL),
    series(INSTANCES, 2.0, Role.DECODE),
]


class Rules:
    """What Prometheus says. The age of its figures is two seconds."""

    def __init__(self) -> None:
        self.found = COMPLETE
        self.down = False
        self.server = FakePrometheus(self._answer)

    def _answer(self, expr: str, at_s: float) -> Sequence[tuple[Mapping[str, str], float]]:
        if self.down:
            raise PrometheusError("http://127.0.0.1:9090 cannot be asked")
        return [({}, 2.0)] if expr.startswith("time()") else self.found


async def test_the_rules_give_the_same_figures() -> None:
    told = Rules()
    found = await PrometheusSource(told.server, "pdmux").take(10.0, 3)
    assert found is not None
    assert (found.prefill_tokens_per_s, found.generated_tokens_per_s, found.finished_per_s) == (100.0, 50.0, 2.0)
    assert (found.decoding, found.decode_context_tokens, found.queued_prefill_tokens) == (12.0, 12.0, 12.0)
    assert (found.running, found.waiting) == (8.0, 8.0), "not of those that only prefill"
    assert found.taken_s == pytest.approx(8.0, abs=0.5)
    assert all(name in told.server.asked[0] for name in RULES)
    assert 'app="pdmux"' in told.server.asked[0]


@pytest.mark.parametrize("gone", RULES)
async def test_a_missing_rule_leaves_the_old_figures_and_is_named_once(gone: str, caplog: pytest.LogCaptureFixture) -> None:
    told = Rules()
    source = PrometheusSource(told.server, "pdmux")
    before = await source.take(10.0, 3)
    told.found = [each for each in COMPLETE if each[0]["__name__"] != gone]
    assert [await source.take(20.0 + n, 3) for n in range(3)] == [before] * 3
    assert caplog.text.count(f"Prometheus has no {gone}") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", RULES)
async def test_a_figure_that_cannot_be_leaves_the_old_ones_and_is_said(
    name: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    told = Rules()
    source = PrometheusSource(told.server, "pdmux")
    before = await source.take(10.0, 3)
    told.found = [*COMPLETE, series(name, value, Role.DECODE), ({}, 1.0)]
    assert await source.take(20.0, 3) is before
    assert f"{value} of {name}" in caplog.text


async def test_figures_without_those_of_an_instance_are_none(caplog: pytest.LogCaptureFixture) -> None:
    source = PrometheusSource(Rules().server, "pdmux")
    before = await source.take(10.0, 3)
    assert before is not None
    assert await source.take(20.0, 4) is before
    assert "figures of 3 instances, and there are 4" in caplog.text


async def test_a_server_that_is_down_leaves_the_old_figures_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    told = Rules()
    source = PrometheusSource(told.server, "pdmux")
    told.down = True
    assert await source.take(10.0, 3) is None
    assert caplog.text.count("cannot be asked") == 1
    told.down = False
    assert await source.take(20.0, 3) is not None


def test_the_rules_that_it_asks_for_are_recorded() -> None:
    recorded = {rule.get("record") for group in rules()["groups"] for rule in group["rules"]}
    assert set(RULES) <= recorded
