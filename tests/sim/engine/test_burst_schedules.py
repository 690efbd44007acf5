"""Whole schedules on a device that takes several decode steps at once: every request gets the tokens of single steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.bench.random_planner import RandomPlanner
from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.runner import StepOutput
from pdmux_ray.types import Mode
from tests.examples import tried
from tests.unit.engine.test_schedules import Arrival, arrivals, check_ends, drain
from tests.unit.engine.world import PAGE, VOCAB, Log, StrictRunner, Worlds, limits

from .test_lane_schedules import LANE_MODES, TOKEN_S

quick = settings(max_examples=tried(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
MOST_STEPS = st.integers(1, 9)
STEP_S = st.sampled_from([0.002, 0.01])  # the policy's bursts are of 50 ms at most


class TickingRunner(StrictRunner):
    """Lets something happen while it computes a step, also amid a burst."""

    def __init__(self, pages: int, step_s: float, token_s: float, clock: Clock, most_steps: int) -> None:
        super().__init__(pages, PAGE, step_s, token_s, clock, vocab_size=VOCAB, most_steps=most_steps)
        self.tick: Callable[[], None] = lambda: None

    def collect(self) -> StepOutput | None:
        self.tick()
        return super().collect()


def play(schedule: list[Arrival], engine: Engine, log: Log, device: TickingRunner) -> None:
    """A schedule whose time is counted in steps of the device, and in those of the engine."""
    ticks = count()

    def tick() -> None:
        now = next(ticks)
        for arrival in schedule:
            if arrival.step == now:
                engine.submit(arrival.new)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == now:
                engine.abort([arrival.new.request_id])

    device.tick = tick
    for _ in range(80):
        tick()
        engine.step()
        engine.check_integrity()
    drain(engine)
    check_ends(schedule, engine, log)
    assert engine.counters.generated_tokens == sum(len(log.tokens(arrival.new.request_id)) for arrival in schedule)
    assert device._burst is None


@quick
@given(
    schedule=arrivals(),
    mode=st.sampled_from(LANE_MODES),
    pages=st.integers(10, 40),
    max_batch=st.integers(1, 6),
    prefix_cache=st.booleans(),
    step_s=STEP_S,
    token_s=TOKEN_S,
    most_steps=MOST_STEPS,
)
def test_any_schedule_with_any_number_of_steps_at_once_gives_every_request_its_own_tokens_and_exactly_one_end(
    schedule: list[Arrival],
    mode: Mode,
    pages: int,
    max_batch: int,
    prefix_cache: bool,
    step_s: float,
    token_s: float,
    most_steps: int,
) -> None:
    worlds, clock = Worlds(), VirtualClock()
    device = TickingRunner(pages, step_s, token_s, clock, most_steps)
    bounds = limits(
        mode=mode,
        max_batch=max_batch,
        prefix_cache=prefix_cache,
        context_length=40,
        multiplex=MultiplexConfig(itl_s=0.05, ttft_s=0.5),
    )
    engine, log = worlds(bounds, runner=lambda _: device, clock=clock, costs=device.costs)
    play(schedule, engine, log, device)
    worlds.close()


@quick
@given(
    schedule=arrivals(),
    seed=st.integers(0, 2**32),
    pages=st.integers(10, 40),
    max_batch=st.integers(1, 6),
    prefix_cache=st.booleans(),
    token_s=TOKEN_S,
    most_steps=MOST_STEPS,
)
def test_bursts_that_are_drawn_also_beside_blocks_give_every_request_its_own_tokens_and_exactly_one_end(
    schedule: list[Arrival], seed: int, pages: int, max_batch: int, prefix_cache: bool, token_s: float, most_steps: int
) -> None:
    worlds, clock = Worlds(), VirtualClock()
    device = TickingRunner(pages, 0.01, token_s, clock, most_steps)
    bounds = limits(mode=Mode.AUTO, max_batch=max_batch, prefix_cache=prefix_cache, context_length=40)
    planner = RandomPlanner(seed, max_batch, most_steps=most_steps)
    engine, log = worlds(bounds, runner=lambda _: device, clock=clock, planner=planner)
    play(schedule, engine, log, device)
    worlds.close()
