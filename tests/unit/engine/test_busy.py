"""What an engine tells its port of its device: how long it may be silent, because a step takes so long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.api import PortEvent
from pdmux_ray.clock import VirtualClock
from pdmux_ray.engine.handoffs import NoPort
from pdmux_ray.engine.limits import EngineLimits
from pdmux_ray.types import Mode

from .lane_world import device, fixed
from .world import BASE, Worlds, limits, request


class Told(NoPort):
    """Notes how long the engine was silent, and how long it had said that it may be."""

    def __init__(self, clock: VirtualClock) -> None:
        self.silences: list[tuple[float, float]] = []
        self._clock = clock
        self._since = self.said_s = 0.0

    def busy(self, seconds: float) -> None:
        self._break()
        self.said_s = seconds

    def poll(self) -> Sequence[PortEvent]:
        self._break()
        return ()

    def _break(self) -> None:
        now = self._clock.now()
        if now > self._since:
            self.silences.append((now - self._since, self.said_s))
        self._since = now


def silences(worlds: Worlds, bounds: EngineLimits) -> list[tuple[float, float]]:
    """Of a long prompt beside a request that decodes; (seconds, seconds said)."""
    clock = VirtualClock()
    told = Told(clock)
    engine, log = worlds(bounds, runner=lambda clock: device(clock), clock=clock, port=told)
    engine.submit(request("reader", max_tokens=12))
    while not log.tokens("reader"):
        engine.step()
    engine.submit(request("long", [2] * 40, max_tokens=3))
    while engine.step():
        pass
    assert told.said_s == 0.0, "an idle device has nothing to take long for"
    return told.silences


@pytest.mark.parametrize("bounds", [fixed(3), fixed(8), fixed(2, Mode.TIME_SHARED)], ids=["blocks", "whole", "time shared"])
def test_with_a_latency_model_a_silence_is_shorter_than_said_and_what_is_said_is_not_much_longer(
    worlds: Worlds, bounds: EngineLimits
) -> None:
    times = silences(worlds, bounds)
    assert len(times) > 10
    assert [(seconds, said_s) for seconds, said_s in times if not seconds < said_s <= BASE.stall_timeout_s] == []
    longest_s = max(seconds for seconds, _ in times)
    assert max(said_s for _, said_s in times) < 10 * longest_s


@pytest.mark.parametrize("mode", [Mode.PREFILL_FIRST, Mode.CHUNKED])
def test_without_one_a_step_may_take_as_long_as_it_may_anyway(worlds: Worlds, mode: Mode) -> None:
    assert {said_s for _, said_s in silences(worlds, limits(mode=mode))} == {BASE.stall_timeout_s}


def test_no_prediction_is_beyond_the_stall_timeout(worlds: Worlds) -> None:
    said = {said_s for _, said_s in silences(worlds, replace(fixed(8), stall_timeout_s=1.0))}
    assert max(said) == 1.0
