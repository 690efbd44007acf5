from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdmux_ray.clock import Clock, VirtualClock
from pdmux_ray.engine.limits import EngineLimits

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
