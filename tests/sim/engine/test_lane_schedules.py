"""Whole schedules on two lanes: whatever runs beside a request, and where, it gets the tokens that it would get alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmux_ray.bench.random_planner import RandomPlanner
from pdmux_ray.clock import VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.types import Mode
from tests.examples import tried
from tests.unit.engine.test_schedules import Arrival, arrivals, drain, play
from tests.unit.engine.world import PAGE, VOCAB, Log, StrictRunner, Worlds, expected, limits, request

LANE_MODES = [Mode.TIME_SHARED, Mode.SPLIT, Mode.CAPPED, Mode.AUTO]
TOKEN_S = st.sampled_from([0.0005, 0.005, 0.05])  # a block takes less than a decode, as long, or many of them

quick = settings(max_examples=tried(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lane_engine(worlds: Worlds, mode: Mode, pages: int = 64, token_s: float = 0.005, **changes: object) -> tuple[Engine, Log]:
    """With the policy that predicts; its predictions are exact."""
    clock = VirtualClock()
    device = StrictRunner(pages, PAGE, 0.01, token_s, clock, vocab_size=VOCAB)
    values = {"multiplex": MultiplexConfig(itl_s=0.05, ttft_s=1.0), **changes}
    return worlds(limits(mode=mode, **values), runner=lambda _: device, clock=clock, costs=device.costs)


@quick
@given(
    schedule=arrivals(last_step=15),
    seed=st.integers(0, 2**32),
    pages=st.integers(10, 40),
    max_batch=st.integers(1, 6),
    prefix_cache=st.booleans(),
    token_s=TOKEN_S,
)
def test_any_schedule_on_random_splits_gives_every_request_its_own_tokens_and_exactly_one_end(
    schedule: list[Arrival], seed: int, pages: int, max_batch: int, prefix_cache: bool, token_s: float
) -> None:
    worlds = Worlds()
    engine, log = worlds(
        limits(mode=Mode.AUTO, max_batch=max_batch, prefix_cache=prefix_cache, context_length=40),
        runner=lambda clock: StrictRunner(pages, PAGE, 0.01, token_s, clock, vocab_size=VOCAB),
        planner=RandomPlanner(seed, max_batch),
    )
    play(schedule, engine, log)
    worlds.close()


@quick
@given(
    schedule=arrivals(last_step=15),
    mode=st.sampled_from(LANE_MODES),
    pages=st.integers(10, 40),
    max_batch=st.integers(1, 6),
    token_s=TOKEN_S,
    itl_s=st.sampled_from([0.001, 0.02, 0.2, 2.0]),
)
def test_any_schedule_in_any_mode_gives_every_request_its_own_tokens_and_exactly_one_end(
    schedule: list[Arrival], mode: Mode, pages: int, max_batch: int, token_s: float, itl_s: float
) -> None:
    worlds = Worlds()
    multiplex = MultiplexConfig(itl_s=itl_s, ttft_s=0.5)
    engine, log = lane_engine(worlds, mode, pages, token_s, multiplex=multiplex, max_batch=max_batch, context_length=40)
    play(schedule, engine, log)
    worlds.close()


@pytest.mark.parametrize("mode", LANE_MODES)
def test_preempted_requests_that_share_a_prompt_keep_their_tokens(worlds: Worlds, mode: Mode) -> None:
    engine, log = lane_engine(worlds, mode, pages=16)
    requests = [request(f"r{i}", [1] * 17, max_tokens=30, seed=i) for i in range(6)]
    for new in requests:
        engine.submit(new)
    drain(engine)
    for new in requests:
        assert (log.tokens(new.request_id), log.finish(new.request_id)) == expected(new, engine.limits)
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_hit_tokens > 0
