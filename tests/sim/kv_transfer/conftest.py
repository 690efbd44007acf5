from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from .fleet import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Everybody's pages, handoffs, bytes and threads are checked when the test ends."""
    threads = set(threading.enumerate())
    made = Fleet()
    yield made
    made.settle()
    made.check()
    assert set(threading.enumerate()) <= threads, "a thread was left running"
