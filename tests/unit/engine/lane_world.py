"""Engines whose device has two lanes, and plans that are written down."""

from __future__ import annotations

from typing import Any

from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.config import MultiplexConfig
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.lanes import LaneScheduler
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.policy.decisions import Block, Chunk, LaneUse, ModeReason, StepPlan, StepReason
from pdmux_ray.policy.views import LanesView
from pdmux_ray.types import Mode, Split

from .world import PAGE, VOCAB, Log, StrictRunner, Worlds, expected, limits, request

STEP_S, TOKEN_S, UNITS, LAYERS = 0.01, 0.01, 8, 8
HALF = Split(4, 4)


def device(clock: Clock, kind: type[FakeRunner] = StrictRunner, pages: int = 64) -> FakeRunner:
    return kind(pages, PAGE, STEP_S, TOKEN_S, clock, vocab_size=VOCAB, layers=LAYERS, units=UNITS)


def fixed(layers: int | None = 2, mode: Mode = Mode.SPLIT, ttft_s: float | None = None) -> EngineLimits:
    """Half of the units for each lane, and blocks of so many layers."""
    return limits(mode=mode, multiplex=MultiplexConfig(policy="fixed", block_layers=layers, ttft_s=ttft_s))


def lanes_of(engine: Engine) -> LaneScheduler:
    assert isinstance(engine._scheduler, LaneScheduler)
    return engine._scheduler


def started(worlds: Worlds, kind: type[FakeRunner] = StrictRunner, layers: int = 2) -> tuple[Engine, Log, VirtualClock]:
    """An engine in which `reader` decodes and the first block of `long`, of four, is in flight."""
    clock = VirtualClock()
    engine, log = worlds(fixed(layers), runner=lambda clock: device(clock, kind), clock=clock)
    engine.submit(request("reader", max_tokens=40))
    while not log.tokens("reader"):
        engine.step()
    engine.submit(request("long", [2] * 20, max_tokens=3))
    engine.step()
    return engine, log, clock


def assert_right(log: Log, engine: Engine, *names_and_requests: Any) -> None:
    for new in names_and_requests:
        assert (log.tokens(new.request_id), log.finish(new.request_id)) == expected(new, engine.limits)


def use(mode: Mode, split: Split, block: Block | None = None) -> LaneUse:
    return LaneUse(mode, split, ModeReason.CONFIGURED, block)


def begin(name: str, tokens: int, end_layer: int) -> Block:
    return Block(None, (Chunk(name, 0, tokens),), end_layer)


class Script:
    """Plans that are written down, one a step; then nothing."""

    def __init__(self, *plans: StepPlan) -> None:
        self.plans = list(plans)

    def __call__(self, view: LanesView) -> StepPlan:
        return self.plans.pop(0)


def both(*decode: str, lanes: LaneUse, preempt: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(StepReason.LANES_BOTH, decode, preempt=preempt, lanes=lanes)
