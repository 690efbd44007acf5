"""One Ray and one Serve for all tests of this folder that ask for them; three applications on the fake device."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from pdmux_ray.bench import server
from pdmux_ray.bench.restarts import replica_pids
from pdmux_ray.config import AppConfig, EngineConfig, FakeConfig, GatewayConfig

ROOT = Path(__file__).parents[2]
STEP_S = 0.02
CONTEXT = 512
VOCABULARY = 49_152  # the demo model's
KEYS_ENV = "PDMUX_TEST_API_KEYS"
STALL_TIMEOUT_S = 0.5


_http = httpx.Client(timeout=30)  # one for all: making a client costs tens of milliseconds


@dataclass(frozen=True)
class App:
    """A running application."""

    url: str
    name: str  # of Serve's application

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str, labels: str = "", key: str = "") -> float:
        """Sum of the series on /metrics whose labels contain `labels`."""
        text = _http.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {}).text
        return sum(map(float, re.findall(rf"^{name}\{{[^}}]*{re.escape(labels)}[^}}]*\}} (\S+)$", text, re.MULTILINE)))

    def busy(self, key: str = "") -> bool:
        """Whether any request holds pages or waits."""
        return any(self.metric(f"pdmux_instance_{what}_requests", key=key) for what in ("running", "waiting"))

    def wait_until_healthy(self, timeout_s: float = 60) -> None:
        end_s = time.monotonic() + timeout_s
        while _http.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < end_s, "not healthy in time"
            time.sleep(0.1)

    def wait_until_linked(self, instances: int, key: str = "", timeout_s: float = 60) -> None:
        """It is healthy as soon as one instance is linked; until all are, and have told their figures."""
        end_s = time.monotonic() + timeout_s
        while len(self._instances_that_told(key)) != instances:
            assert time.monotonic() < end_s, "not every instance was linked in time"
            time.sleep(0.1)

    def _instances_that_told(self, key: str) -> set[str]:
        text = _http.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {}).text
        return set(re.findall(r'^pdmux_steps_total\{[^}]*instance="([^"]*)"', text, re.MULTILINE))


def replicas(app: App, deployment: str) -> list[int]:
    """The pids of an application's replicas of that deployment."""
    return replica_pids(app.name, deployment)


def fake_engine(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"device": "fake", "context_length": CONTEXT, "fake": FakeConfig(step_s=STEP_S)} | fields
    )


# Path -> what runs there.
CONFIGS = {
    "/": AppConfig(
        served_model_name="demo", engine=fake_engine(), gateway=GatewayConfig(max_body_bytes=200_000, max_prompts=16)
    ),
    "/keyed": AppConfig(
        served_model_name="demo",
        instances=2,
        engine=fake_engine(max_batch=1, max_waiting=2, prefix_cache=False),
        gateway=GatewayConfig(api_keys_env=KEYS_ENV, discovery_period_s=0.5),
    ),
    "/slow": AppConfig(
        served_model_name="demo",
        engine=fake_engine(stall_timeout_s=STALL_TIMEOUT_S, fake=FakeConfig(step_s=STEP_S, prefill_s_per_token=0.02)),
        gateway=GatewayConfig(request_timeout_s=4.0),
    ),
}


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """The URL under which every application of CONFIGS runs."""
    with warnings.catch_warnings():  # Ray's own, about its own code
        warnings.simplefilter("ignore")
        import ray
        from ray import serve

    from pdmux_ray.serve.app import build_app

    os.environ[KEYS_ENV] = "first-key, second-key"  # before Ray starts: replicas inherit it
    port = server.free_port()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        for path, config in CONFIGS.items():
            serve.run(build_app(config), name=f"app{path.replace('/', '-')}", route_prefix=path)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        del os.environ[KEYS_ENV]


@pytest.fixture
def app(served: str) -> Iterator[App]:
    """The plain application. A test must leave no request behind: every page is free again soon after it."""
    yield from _left_clean(App(served, "app-"))


@pytest.fixture(scope="session")
def behind_haproxy() -> Iterator[App]:
    """The plain application as `scripts/serve` runs it."""
    settings = [
        "served_model_name=demo",
        "engine.device=fake",
        f"engine.context_length={CONTEXT}",
        f"engine.fake.step_s={STEP_S}",
    ]
    command = " --set ".join([f"{ROOT}/scripts/serve --port {{port}}", *settings])
    with server.running(command, "demo") as started:
        yield App(started.url, "pdmux")


@pytest.fixture(params=["proxy", "haproxy"])
def either(request: pytest.FixtureRequest) -> Iterator[App]:
    """`app` behind Serve's own proxy, then behind HAProxy."""
    if request.param == "haproxy":
        yield from _left_clean(request.getfixturevalue("behind_haproxy"))
    else:
        yield request.getfixturevalue("app")


def _left_clean(app: App) -> Iterator[App]:
    app.wait_until_healthy()
    yield app
    end_s = time.monotonic() + 30
    while app.busy():
        assert time.monotonic() < end_s, "the test has left a request running"
        time.sleep(0.05)


@pytest.fixture
def keyed(served: str) -> App:
    """Asks for a key; two instances that run one request each and let two wait."""
    app = App(f"{served}/keyed", "app-keyed")
    app.wait_until_linked(2, key="first-key")
    return app


@pytest.fixture
def slow(served: str) -> App:
    """A prefill takes 20 ms a token, a step of more than STALL_TIMEOUT_S is a stall, and a request has 4 s."""
    app = App(f"{served}/slow", "app-slow")
    app.wait_until_healthy()
    return app
