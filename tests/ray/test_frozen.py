"""An instance that is frozen and stays so: Serve ends it, and with it its right to write into the memory of others."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdmux_ray.serve import app as serve_app
from tests.ray.conftest import App
from tests.ray.test_disaggregated import CONFIG, Pair, ask
from tests.ray.test_operation import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]


@pytest.fixture
def mortal(served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A pair whose instances are looked at every second, and given little time to end."""
    from ray import serve

    monkeypatch.setattr(serve_app, "HEALTH_CHECK_PERIOD_S", 1.0)
    monkeypatch.setattr(serve_app, "HEALTH_CHECK_TIMEOUT_S", 3.0)
    monkeypatch.setattr(serve_app, "MAX_DRAIN_S", 1.0)
    config = CONFIG.model_copy(update={"engine": CONFIG.engine.model_copy(update={"stall_timeout_s": 2.0})})
    serve.run(serve_app.build_app(config), name="mortal", route_prefix="/mortal")
    pair = Pair(f"{served}/mortal", "mortal")
    wait_until(pair.joined, 60)
    yield pair
    serve.delete("mortal")


def test_pages_that_an_instance_frozen_for_ever_could_write_into_come_back_when_serve_has_ended_it(
    mortal: Pair, app: App
) -> None:
    """Row 7."""
    prefill = mortal.named("prefill")
    pid = mortal.pid(prefill)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, mortal, 7)
        wait_until(lambda: mortal.running(prefill) == 1, 30)
        os.kill(pid, signal.SIGSTOP)
        assert answer.result() == ask(app, 7)
    assert mortal.metric("pdmux_instance_quarantined_pages") > 0
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 90)
    wait_until(lambda: mortal.metric("pdmux_instance_quarantined_pages") == 0, 30)
    wait_until(mortal.joined, 60)
