from __future__ import annotations

import pytest

from pdmux_ray.clock import VirtualClock
from pdmux_ray.latency.profile import Profile
from pdmux_ray.latency.run import run

from .lawful import IDENTITY, LIMITS, Law, LawfulRunner, machine


@pytest.fixture(scope="session")
def law() -> Law:
    return Law()


@pytest.fixture(scope="session")
def profile(law: Law, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a device that obeys `law`."""
    clock = VirtualClock()
    runner = LawfulRunner(law, clock)
    partial = tmp_path_factory.mktemp("profile") / "p.partial"
    made, kept = run(runner, LIMITS, IDENTITY, partial, machine(clock))
    kept.remove()
    runner.close()
    return made
