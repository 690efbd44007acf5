"""Decode steps that are alike, taken at once, leave what they leave one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.costs.device import Slower
from pdmux_ray.costs.gpu import H200, LLAMA_8B, device_model
from pdmux_ray.engine.engine import Engine
from pdmux_ray.metrics.lifeline import Ending
from pdmux_ray.sim.fleet import Run, simulate
from pdmux_ray.types import Load
from pdmux_ray.workload.arrivals import plan
from pdmux_ray.workload.requests import Ask, PlannedRequest

from .fleets import config, device, requests, stream

MODES = ("auto", "split", "capped", "time_shared", "chunked", "prefill_first")

asked = st.tuples(st.integers(0, 2), st.integers(1, 120), st.integers(1, 90), st.sampled_from([0.0, 0.0031, 0.11, 0.73]))
fleets = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)).filter(lambda counts: counts[1] + counts[2] > 0)


def conversations(turns: list[tuple[int, int, int, float]]) -> list[PlannedRequest]:
    """(who, how long by now, tokens of the answer, seconds since the turn before): the prompts of one begin alike."""
    due_s, times_s = 0.0, []
    for *_, pause_s in turns:
        due_s += pause_s
        times_s.append(due_s)
    asks = [Ask(tuple(range(1000 * who, 1000 * who + tokens)), answer) for who, tokens, answer, _ in turns]
    return plan(asks, times_s)


def told(run: Run) -> list[Any]:
    """All that anybody could see of it."""
    return [
        [[life.token_s.tolist(), life.ended_s, life.ending, life.error] for life in run.lifelines],
        list(run.choices),
        {name: seen(engine) for name, engine in run.engines.items()},
    ]


def seen(engine: Engine) -> tuple[Any, ...]:
    load: Load = engine.load()
    return engine.timeline.since(0, most=1_000_000), engine.counters, load.free_pages, load.steps, load.decode_context_tokens


@settings(max_examples=15, deadline=None)
@given(
    st.lists(asked, min_size=1, max_size=12),
    fleets,
    st.sampled_from(["predict", "threshold", "local", "remote"]),
    st.sampled_from(MODES),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([60, 400]),
)
def test_lifelines_routes_timelines_and_counters_are_the_same_whatever_comes(
    turns: list[tuple[int, int, int, float]],
    roles: tuple[int, int, int],
    policy: str,
    mode: str,
    spread: float,
    pages: int,
) -> None:
    model = device()
    model = replace(model, layout=replace(model.layout, pages=pages))
    at_once, one_by_one = (
        simulate(
            *(config(*roles, policy, mode=mode, max_batch=4), model, conversations(turns)),
            seed=3,
            spread=spread,
            context_length=240,
            coalesce=coalesce,
        )
        for coalesce in (True, False)
    )
    assert told(at_once) == told(one_by_one)


def learned(coalesce: bool) -> Run:
    model = replace(device_model(H200, LLAMA_8B), slower=Slower(decode=1.3))
    return simulate(
        *(config(0, 2, page_size=16), model, stream([(200, 90), (30, 160), (900, 40)] * 3, 0.3)),
        learning=True,
        coalesce=coalesce,
    )


def test_they_teach_the_same() -> None:
    assert told(learned(True)) == told(learned(False))


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
