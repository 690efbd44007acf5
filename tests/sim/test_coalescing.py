"""Decode steps that are alike, taken at once, leave what they leave one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pdmux_ray.config import AppConfig
from pdmux_ray.costs.device import DeviceModel, HostTimes, Slower
from pdmux_ray.costs.gpu import H200, LLAMA_8B, device_model
from pdmux_ray.costs.pace import Pace
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.timeline import Step
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.policy.decisions import AdmitReason, PlacementReason
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.types import Load
from pdmux_ray.workload.arrivals import plan
from pdmux_ray.workload.requests import Ask, PlannedRequest
from tests.examples import tried
from tests.unit.sim.fleets import config, device, requests

LANES = ("auto", "split", "capped", "time_shared")
MODES = (*LANES, "chunked", "prefill_first")
PAUSES_S = (0.0, 0.0031, 0.11, 0.73, 2.1)
CONTEXT = 240  # tokens; some of the requests ask for more
SLOWER = Slower(decode=1.3, prefill=0.9)  # than instances that learn were told
SCATTERED = (0.8, 1.0, 1.7)  # times as long as in the mean, for a tenth of a second's work each
PACE = Pace((0.0, 0.08, 0.18), (0.0, 0.1, 0.2), 0.35, 0.3)
NO_HOST, HOST = HostTimes(), HostTimes(0.0007, 0.0013)

Turns = list[tuple[int, int, int, float]]
"""(who, how long by now, tokens of the answer, seconds since the turn before): the prompts of one begin alike."""


@dataclass(frozen=True)
class Case:
    """What is simulated twice."""

    turns: Turns
    roles: tuple[int, int, int] = (0, 1, 0)
    policy: str = "predict"
    mode: str = "auto"
    pages: int = 400
    max_waiting: int = 64
    timeout_s: float = 600.0
    refusing: bool = False  # whose first token would be late
    spread: float = 0.0
    pace: Pace | None = None
    host: HostTimes = NO_HOST
    learning: bool = False
    placing: bool = False  # a controller gives instances other roles, as soon as it can

    @property
    def config(self) -> AppConfig:
        objectives: dict[str, object] = {"itl_s": 0.05}
        if self.refusing and self.mode in LANES:
            objectives |= {"ttft_s": 0.012 if self.learning else 0.02, "admission": "refuse"}
        app = config(
            *(*self.roles, self.policy), mode=self.mode, max_batch=4, max_waiting=self.max_waiting, multiplex=objectives
        )
        hurried = {"enabled": self.placing, "period_s": 0.11, "busy": 1e-3, "margin": 0.01, "confirm_s": 0, "cool_down_s": 0}
        return app.model_copy(
            update={
                "gateway": app.gateway.model_copy(update={"request_timeout_s": self.timeout_s}),
                "placement": app.placement.model_copy(update=hurried),
            }
        )

    @property
    def device(self) -> DeviceModel:
        model = replace(device_model(H200, LLAMA_8B, 4), slower=SLOWER) if self.learning else device()
        return replace(model, layout=replace(model.layout, pages=self.pages), pace=self.pace, host=self.host)

    @property
    def planned(self) -> list[PlannedRequest]:
        due_s, times_s = 0.0, []
        for *_, pause_s in self.turns:
            due_s += pause_s
            times_s.append(due_s)
        asks = [Ask(tuple(range(1000 * who, 1000 * who + tokens)), answer) for who, tokens, answer, _ in self.turns]
        return plan(asks, times_s)

    def run(self, coalesce: bool) -> Run:
        about: dict[str, Any] = {"spread": self.spread, "learning": self.learning, "coalesce": coalesce}
        return simulate(self.config, self.device, self.planned, seed=3, context_length=CONTEXT, **about)


def told(run: Run) -> list[Any]:
    """All that anybody could see of it."""
    return [
        [[life.token_s.tolist(), life.ended_s, life.ending, life.error] for life in run.lifelines],
        list(run.choices),
        list(run.looks),
        {name: seen(engine) for name, engine in run.engines.items()},
    ]


def seen(engine: Engine) -> tuple[Any, ...]:
    load: Load = engine.load()
    return engine.timeline.since(0, most=1_000_000), engine.counters, load.free_pages, load.steps, load.decode_context_tokens


turn = st.tuples(st.integers(0, 2), st.integers(1, CONTEXT), st.integers(1, 90), st.sampled_from(PAUSES_S))
FLEETS = [fleet for fleet in product((0, 1, 2), (0, 1, 2), (0, 1)) if any(fleet[1:])]
cases = st.builds(
    Case,
    turns=st.lists(turn, min_size=1, max_size=12),
    roles=st.sampled_from(FLEETS),
    policy=st.sampled_from(["predict", "threshold", "local", "remote"]),
    mode=st.sampled_from(MODES),
    pages=st.sampled_from([60, 400]),
    max_waiting=st.sampled_from([1, 64]),
    timeout_s=st.sampled_from([0.2, 600.0]),
    refusing=st.booleans(),
    spread=st.sampled_from([0.0, 0.05]),
    pace=st.sampled_from([None, PACE]),
    host=st.sampled_from([NO_HOST, HOST]),
    learning=st.booleans(),
    placing=st.booleans(),
)


@settings(max_examples=tried(25), deadline=None)
@given(cases)
def test_lifelines_routes_timelines_and_counters_are_the_same_whatever_comes(case: Case) -> None:
    at_once, one_by_one = (case.run(coalesce) for coalesce in (True, False))
    assert told(at_once) == told(one_by_one)
    for name, happens in HAPPENS.items():
        event(f"{name}: {happens(at_once)}")


def errors(run: Run) -> str:
    return " ".join(life.error for life in run.lifelines if life.error)


def roles_change(run: Run) -> bool:
    """With the load: after the first look."""
    return any(look.plan.reason in (PlacementReason.MORE_DECODE, PlacementReason.MORE_PREFILL) for look in run.looks)


def one_is_refused_as_late(run: Run) -> bool:
    return any(engine.counters.admissions[AdmitReason.LATE] for engine in run.engines.values())


def is_learned(run: Run) -> bool:
    """Whether steps are predicted better at the end than at the beginning."""
    off = [abs(step.predicted_s / (step.end_s - step.begin_s) - 1) for step in decodes(run) if step.predicted_s]
    return len(off) > 50 and off[-1] < 0.1 < off[0]


def steps_are_scattered(run: Run) -> bool:
    """As the pace says."""
    ratios = {round((step.end_s - step.begin_s) / step.predicted_s, 3) for step in decodes(run) if step.predicted_s}
    return ratios >= set(SCATTERED)


def decodes(run: Run) -> list[Step]:
    records = [record for engine in run.engines.values() for record in engine.timeline.since(0, most=10_000)]
    return [record for record in records if isinstance(record, Step) and not record.prefill_tokens]


HAPPENS: dict[str, Callable[[Run], bool]] = {
    "roles change": roles_change,
    "the queue is full": lambda run: "queue is full" in errors(run),
    "a first token would be late": one_is_refused_as_late,
    "a prompt is too long": lambda run: "context" in errors(run),
    "a deadline passes": lambda run: "past its deadline" in errors(run),
    "steps are scattered": steps_are_scattered,
    "predictions are learned": is_learned,
}
ALONE: Turns = [(0, 30, 200, 0.0)]
TWO: Turns = [(0, 30, 90, 0.0), (1, 30, 60, 0.11)]
CROWD: Turns = [(who, 100, 80, 0.0031) for who in range(12)]
LASTING: Turns = [(who, 20 + who, 60, pause_s) for who, pause_s in enumerate([0.0, 0.73, 2.1, 0.11, 0.73, 2.1, 0.11, 0.73])]
EXAMPLES: Sequence[tuple[str, Case]] = (
    ("roles change", Case(LASTING, (2, 1, 0), "remote", placing=True)),
    ("roles change", Case(LASTING, (2, 1, 0), "remote", "chunked", placing=True, learning=True, spread=0.05)),
    ("the queue is full", Case(CROWD, max_waiting=1)),
    ("a first token would be late", Case(CROWD, refusing=True)),
    ("a first token would be late", Case(CROWD, mode="split", refusing=True, learning=True)),
    ("a prompt is too long", Case([*TWO, (1, CONTEXT, 1, 0.0)])),
    ("a deadline passes", Case([*ALONE, (1, 10, 90, 0.11)], timeout_s=0.4)),
    ("a deadline passes", Case([*CROWD[:2], *ALONE], (1, 1, 0), "remote", timeout_s=0.4)),
    ("steps are scattered", Case(TWO, pace=PACE)),
    ("predictions are learned", Case(TWO, learning=True)),
    ("predictions are learned", Case(LASTING[:4], (0, 2, 0), mode="time_shared", learning=True)),
)


@pytest.mark.parametrize(("what", "case"), EXAMPLES, ids=[f"{what}, {case.mode}" for what, case in EXAMPLES])
def test_and_when_something_else_happens_amid_them(what: str, case: Case) -> None:
    at_once = case.run(coalesce=True)
    assert HAPPENS[what](at_once)
    assert at_once.events < (one_by_one := case.run(coalesce=False)).events
    assert told(at_once) == told(one_by_one)


@pytest.mark.parametrize("drain_s", [0.02, 0.3, 0.7])
def test_a_simulation_that_ends_amid_them_has_the_tokens_that_had_come(drain_s: float) -> None:
    runs = [
        simulate(config(0, 1), device(), requests((0.0, 10, 300), (0.4, 30, 300)), drain_s=drain_s, coalesce=coalesce)
        for coalesce in (True, False)
    ]
    assert told(runs[0]) == told(runs[1])
    assert [life.ending for life in runs[0].lifelines] == [Ending.UNFINISHED] * 2
    assert len(runs[0].lifelines[0].token_s) > 10


def test_a_deadline_amid_them_is_kept_at_the_same_step() -> None:
    app = config(0, 1)
    app = app.model_copy(update={"gateway": app.gateway.model_copy(update={"request_timeout_s": 0.8})})
    runs = [simulate(app, device(), requests((0.0, 10, 300)), coalesce=coalesce) for coalesce in (True, False)]
    assert told(runs[0]) == told(runs[1])
    assert runs[0].lifelines[0].ending is Ending.ERROR


def events(coalesce: bool) -> int:
    """Of a run of one request."""
    return simulate(config(0, 1), device(), requests((0.0, 10, 400)), coalesce=coalesce).events


def test_they_are_few_events() -> None:
    assert events(True) < events(False) / 5
