from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from .world import Worlds


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Engines that are closed, and whose pages, queues, events and threads are checked, when the test ends."""
    threads = set(threading.enumerate())
    made = Worlds()
    yield made
    made.close()
    assert set(threading.enumerate()) <= threads, "a thread was left running"
