"""What goes into Ray's own export. Nothing of Ray needs to run for it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

with warnings.catch_warnings():  # Ray's own, about its own code
    warnings.simplefilter("ignore")
    from pdmux_ray.serve import mirror

pytestmark = pytest.mark.ray


class Troubled(Collector):
    """Its first two answers are errors."""

    def __init__(self) -> None:
        self.answers = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.answers += 1
        if self.answers <= 2:
            raise ZeroDivisionError("nobody is there")
        yield GaugeMetricFamily("pdmux_open_requests", "", 3.0)


async def test_figures_that_cannot_be_had_are_said_once_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "PERIOD_S", 0.001)
    registry = Troubled()
    mirrored = mirror.Mirror(registry, ("pdmux_open_requests",))
    while registry.answers < 4:
        await asyncio.sleep(0.001)
    mirrored.close()
    assert caplog.text.count("are missing: ZeroDivisionError('nobody is there')") == 1
