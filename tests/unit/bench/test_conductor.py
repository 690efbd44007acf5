"""What a run's end says of its server, and of its rate."""

from __future__ import annotations

import math

import pytest

from pdmux_ray.bench.load import conductor
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.targets import TargetError
from pdmux_ray.metrics.lifeline import Lifeline


@pytest.mark.parametrize(("said", "gone"), [("HTTP 429: slow down", False), ("HTTP 503: busy", False), ("HTTP 500", True)])
def test_a_server_that_refuses_for_a_while_has_not_gone_away(monkeypatch: pytest.MonkeyPatch, said: str, gone: bool) -> None:
    refusals = [TargetError(said)] * 2

    async def checked(target: Target) -> Target:
        if refusals:
            raise refusals.pop()
        return target

    monkeypatch.setattr(conductor, "checked", checked)
    monkeypatch.setattr(conductor, "SETTLE_S", 0.0)
    assert (conductor._gone(Target("http://host", "m")) is not None) == gone


def test_a_server_that_refuses_for_long_has_gone_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def checked(target: Target) -> Target:
        raise TargetError("HTTP 429: slow down")

    monkeypatch.setattr(conductor, "checked", checked)
    monkeypatch.setattr(conductor, "SETTLE_S", 0.0)
    monkeypatch.setattr(conductor, "BUSY_S", 0.01)
    assert conductor._gone(Target("http://host", "m")) is not None


def test_requests_that_hardly_began_do_not_spoil_the_rate_of_a_closed_loop() -> None:
    assert conductor._rate([Lifeline(0.0), Lifeline(0.0, ended_s=4.0)]) == 0.5
    assert conductor._rate([Lifeline(1.0, ended_s=math.nan)]) == 0.0
