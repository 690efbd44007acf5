"""One trace through an engine as servers drive it, on the fake device, and through the simulator: the same decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.sim.fleet import BEGIN_S, LINE_S, simulate
from pdmux_ray.types import ModelFacts, NewRequest, SamplingParams, TokenEvent
from pdmux_ray.workload.requests import PlannedRequest
from tests.unit.sim.fleets import LAYERS, PAGE, PAGES, STEP_S, TOKEN_S, UNITS, config, linear, stream

FACTS = ModelFacts(512, 2**24, frozenset())
MODES = ("auto", "split", "capped", "time_shared", "chunked", "prefill_first")
lengths = st.tuples(st.integers(1, 300), st.integers(1, 10))
GAPS = st.sampled_from([0.000713, 0.011317, 0.057119])  # nobody comes just when a step ends: either order would be right


class Arriving(VirtualClock):
    """Requests come while time passes, as they do to an engine amid a step."""

    def __init__(self, planned: Sequence[PlannedRequest]) -> None:
        super().__init__()
        self.coming = deque(planned)
        self.engine: Engine | None = None

    def sleep(self, seconds: float) -> None:
        end_s = self.now() + seconds
        while self.coming and self.next_s <= end_s:
            request = self.coming.popleft()
            self.move_to(request.due_s + BEGIN_S + LINE_S)
            assert self.engine is not None
            assert isinstance(request.ask.prompt, tuple)
            params = SamplingParams(max_tokens=request.ask.output_tokens or 1, ignore_eos=True)
            self.engine.submit(NewRequest(str(request.index), request.ask.prompt, params))
        if end_s > self.now():
            self.move_to(end_s)

    @property
    def next_s(self) -> float:
        return self.coming[0].due_s + BEGIN_S + LINE_S


def live(mode: str, planned: Sequence[PlannedRequest]) -> Engine:
    clock = Arriving(planned)
    runner = FakeRunner(PAGES, PAGE, STEP_S, TOKEN_S, clock, layers=LAYERS, units=UNITS)
    limits = resolve_limits(config(mode=mode).engine, FACTS, runner)

    def publish(sink: str, events: list[TokenEvent]) -> None: ...

    engine = clock.engine = Engine(runner, limits, publish, clock)
    while clock.coming or engine.load().waiting or engine.rest_s is not None:
        if not engine.step():
            clock.sleep(clock.next_s - clock.now())
    return engine


def decisions(engine: Engine) -> list[tuple[Any, ...]]:
    """Without the records' numbers, and with times to the microsecond."""
    return [
        tuple(round(value, 6) if isinstance(value, float) else value for index, value in enumerate(record) if index != 1)
        for record in engine.timeline.since(0, most=10_000)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_simulator_decides_as_an_engine_does(mode: str) -> None:
    planned = stream([(200, 6), (30, 10), (8, 3), (280, 2), (100, 8)] * 3, 0.013)
    (simulated,) = simulate(config(0, 1, mode=mode), linear(), planned, spread=0.0, context_length=512).engines.values()
    assert decisions(simulated) == decisions(live(mode, planned))


@settings(max_examples=10, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=10), st.sampled_from(MODES), GAPS)
def test_it_decides_so_whatever_comes(asked: list[tuple[int, int]], mode: str, gap_s: float) -> None:
    planned = stream(asked, gap_s)
    (simulated,) = simulate(config(0, 1, mode=mode), linear(), planned, spread=0.0, context_length=512).engines.values()
    assert decisions(simulated) == decisions(live(mode, planned))
