"""Instances' timelines, as a gateway gathers them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdmux_ray.errors import InstanceUnavailableError, RequestError
from pdmux_ray.metrics.trace import Trace, arrivals_of
from pdmux_ray.serve import timelines, wire
from pdmux_ray.serve.links import Links
from tests.local.serve.test_channel import until
from tests.local.serve.test_links import Fleet, linked, switchboard


@asynccontextmanager
async def two_instances() -> AsyncIterator[Links]:
    fleet = Fleet()
    async with switchboard(fleet, "one"), switchboard(fleet, "two"), linked(fleet) as found:
        await until(lambda: len(found.loads()) == 2)
        yield found


async def trace_of(links: Links, instance: str | None) -> Trace:
    trace: Trace = json.loads(await timelines.trace_json(links.by_id, instance, 60.0))
    return trace


async def test_every_page_of_every_instance_is_in_the_trace() -> None:
    async with two_instances() as links:
        trace = await trace_of(links, None)
    assert {name: len(arrivals_of(trace, name)) for name in trace["otherData"]["instances"]} == {"one": 3, "two": 3}
    assert trace["otherData"]["missing"] == {}
    assert trace["otherData"]["instances"]["two"]["lessons"] == [["decode", 4, 0, None, 1.25, 80]]


async def test_one_instance_may_be_asked_for_by_its_id() -> None:
    async with two_instances() as links:
        assert set((await trace_of(links, "two"))["otherData"]["instances"]) == {"two"}
        with pytest.raises(RequestError, match="no instance 'three'; there are: one, two"):
            await trace_of(links, "three")


async def test_times_of_another_clock_are_told_on_this_machines() -> None:
    """The instance's clock shows 10 s, when its first arrival was."""
    async with two_instances() as links:
        before_s = time.monotonic()
        trace = await trace_of(links, "one")
        after_s = time.monotonic()
    assert before_s - 0.1 <= arrivals_of(trace, "one")[0][0] <= after_s
    assert before_s <= trace["otherData"]["now_s"] <= after_s


async def test_an_instance_that_hangs_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "ANSWER_S", 0.05)

    async def hang(first: int, seconds: float) -> wire.TimelinePage:
        await asyncio.Event().wait()
        raise AssertionError

    async with two_instances() as links:
        links.by_id["two"].line.timeline = hang  # type: ignore[method-assign]
        trace = await trace_of(links, None)
        assert set(trace["otherData"]["instances"]) == {"one"}
        assert trace["otherData"]["missing"] == {"two": "it did not answer within 0.05 s"}
        with pytest.raises(InstanceUnavailableError, match="two did not tell its timeline"):
            await trace_of(links, "two")


async def test_without_instances_the_trace_is_empty() -> None:
    async with linked(Fleet()) as links:
        trace: dict[str, Any] = await trace_of(links, None)
    assert (trace["traceEvents"], trace["otherData"]["instances"]) == ([], {})
