from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.engine.limits import EngineLimits

from .export_world import Instance
from .handoff_world import Link, Pair
from .world import Log, Worlds


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Engines that are closed, and whose pages, queues, events and threads are checked, when the test ends."""
    threads = set(threading.enumerate())
    made = Worlds()
    yield made
    made.close()
    assert set(threading.enumerate()) <= threads, "a thread was left running"


@pytest.fixture
def pair(worlds: Worlds) -> Iterator[Pair]:
    """Two engines on one clock, and the log of the one that decodes. In the end every handoff ends."""
    made: list[Link] = []

    def make(bounds: EngineLimits | None = None, pages: int = 64, clock: Clock | None = None) -> tuple[Link, Log]:
        link, clock = Link(), clock or VirtualClock()
        made.append(link)
        link.decode, log = worlds(bounds, pages, clock=clock, port=link.at_decode)
        link.prefill, silent = worlds(bounds, 64, clock=clock, port=link.at_prefill)
        assert not silent.events
        return link, log

    yield make
    for link in made:
        link.settle()


@pytest.fixture
def instances(worlds: Worlds) -> Iterator[Any]:
    """In the end nothing is leased any more."""
    made: list[Instance] = []

    def make(*args: Any, **more: Any) -> Instance:
        made.append(Instance(worlds, *args, **more))
        return made[-1]

    yield make
    for instance in made:
        assert (instance.engine.load().leased_pages, instance.engine._handoffs.alive) == (0, False)
