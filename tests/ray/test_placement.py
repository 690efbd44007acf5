"""The placement controller over Ray Serve: roles follow the load, requests do not notice, and it may begin anew at any time."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdmux_ray.bench import server
from pdmux_ray.bench.placement import controller_figures
from pdmux_ray.config import IMPORT_PATH, SCALING_POLICY, AppConfig, FakeConfig, GatewayConfig, RoutingConfig, TopologyConfig
from pdmux_ray.config_placement import PlacementConfig
from tests.ray.conftest import App, fake_engine
from tests.ray.test_operation import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]

TOKENS, REQUESTS = 60, 24  # three seconds each; a decode instance takes four at once
SLOW = FakeConfig(step_s=0.05, prefill_s_per_token=0.001)
CONFIG = AppConfig(
    served_model_name="demo",
    topology=TopologyConfig(prefill=2, decode=1),
    engine=fake_engine(
        fake=FakeConfig(step_s=0.05, prefill_s_per_token=0.001), mode="chunked", max_batch=4, prefix_cache=False
    ),
    gateway=GatewayConfig(discovery_period_s=0.5, routing=RoutingConfig(policy="remote")),
    placement=PlacementConfig(enabled=True, period_s=0.5, confirm_s=2.0, cool_down_s=5.0),
)


class Placed(App):
    def instances(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = httpx.get(f"{self.url}/admin/instances", timeout=30).json()["instances"]
        return listed

    def roles(self) -> list[str]:
        return sorted(each["role"] for each in self.instances())

    def joined(self) -> bool:
        listed = self.instances()
        prefills = {each["id"] for each in listed if each["role"] == "prefill"}
        decodes = [set(each["peers"]) for each in listed if each["role"] == "decode"]
        return len(listed) == 3 and all(peers >= prefills for peers in decodes) and not any(each["trouble"] for each in listed)

    def controller(self) -> str | None:
        """Its id."""
        found = [each["labels"] for each in httpx.get(f"{self.url}/metrics/targets", timeout=30).json()]
        return next((str(labels["instance"]) for labels in found if labels["component"] == "controller"), None)


@pytest.fixture(scope="module")
def placed(served: str) -> Iterator[Placed]:
    from ray import serve

    from pdmux_ray.serve.app import build_app

    serve.run(build_app(CONFIG), name="placed", route_prefix="/placed")
    app = Placed(f"{served}/placed", "placed")
    wait_until(app.joined, 60)
    yield app
    serve.delete("placed")


def ask(app: App, seed: int) -> int:
    body = {"model": "demo", "prompt": f"{seed} " + "word " * 30, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True}
    reply = httpx.post(f"{app.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["completion_tokens"])


def test_long_answers_make_an_instance_decode_and_none_of_them_fails(placed: Placed) -> None:
    assert placed.roles() == ["decode", "prefill", "prefill"]
    changes = placed.metric("pdmux_role_changes_total")
    with ThreadPoolExecutor(REQUESTS) as clients:
        answers = [clients.submit(ask, placed, seed) for seed in range(REQUESTS)]
        wait_until(lambda: placed.roles() == ["decode", "decode", "prefill"], 30)
        wait_until(lambda: placed.metric("pdmux_role_changes_total") == changes + 1, 30)  # with the next heartbeat
        assert [answer.result() for answer in answers] == [TOKENS] * REQUESTS
    told = controller_figures(placed.url)
    assert told['pdmux_placement_decisions_total{reason="more_decode"}'] == 1
    assert told['pdmux_placement_instances{role="decode",state="observed"}'] == 2
    assert told["pdmux_placement_stale"] == 0


def test_a_controller_that_begins_anew_leaves_the_roles_as_they_are(placed: Placed) -> None:
    import ray

    before, roles = placed.controller(), placed.roles()
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    (replica,) = (name for name in names if name.startswith(f"SERVE_REPLICA::{placed.name}#Placement#"))
    ray.kill(ray.get_actor(replica, namespace="serve"), no_restart=False)
    wait_until(lambda: placed.controller() not in (before, None), 60)
    wait_until(lambda: controller_figures(placed.url)["pdmux_placement_stale"] == 0, 30)
    assert placed.roles() == roles
    assert controller_figures(placed.url)['pdmux_placement_decisions_total{reason="more_prefill"}'] == 0


def context(name: str, count: int, metrics: dict[str, Any]) -> Any:
    """What Serve knows of a deployment, as it tells a policy."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingContext

    names = {"deployment_id": DeploymentID(name, "app"), "deployment_name": name, "app_name": "app"}
    counts = {"current_num_replicas": count, "target_num_replicas": count, "running_replicas": []}
    load = {"total_num_requests": 0.0, "total_queued_requests": 0.0, "aggregated_metrics": {}, "raw_metrics": metrics}
    bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 8}
    times = {"last_scale_up_time": None, "last_scale_down_time": None, "current_time": 0.0}
    rest: dict[str, Any] = {"policy_state": {}, **times}
    return AutoscalingContext(**names, **counts, **load, **bounds, **rest, config=None)


def wanted(reports: list[float], instances: int) -> dict[str, int]:
    """By deployment, of a controller that has reported so, as Serve asks its policy."""
    from ray.serve._private.common import TimeStampedValue

    from pdmux_ray.serve.scaling import WANTED, FollowPlan, keep

    series = [TimeStampedValue(float(at), value) for at, value in enumerate(reports)]
    told = {WANTED: {"replica": series}} if series else {}
    found = [context("Placement", 1, told), context("Instance", instances, {}), context("Gateway", 1, {})]
    assert all(keep(each)[0] == each.target_num_replicas for each in found), "without the application's policy nothing changes"
    counts, _ = FollowPlan()({each.deployment_id: each for each in found})
    return {key.name: count for key, count in counts.items()}


def test_serve_s_policy_wants_of_the_instances_alone_what_the_controller_said_last() -> None:
    assert wanted([3.0, 5.0], 4) == {"Instance": 5}
    assert wanted([], 4) == {}


def test_without_the_application_s_policy_the_number_stays_and_serve_s_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from pdmux_ray.config_placement import ReplicasConfig
    from pdmux_ray.serve.scaling import instances_between

    policy = instances_between(ReplicasConfig(min=1, max=4), 3).policy.get_policy()()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert [policy(context("Instance", count, {}))[0] for count in (3, 2)] == [3, 2]
    assert caplog.text.count("placement.replicas does nothing: the application app has no autoscaling_policy") == 1


def test_serve_starts_as_many_instances_as_the_load_wants(tmp_path: Path) -> None:
    """Through the application's autoscaling policy, which only a config file can name."""
    args = {
        "served_model_name": "demo",
        "topology": {"mux": 1},
        "engine": {"device": "fake", "context_length": 512, "fake": {"step_s": 0.05}, "max_batch": 4},
        "gateway": {"discovery_period_s": 0.5},
        "placement": {"enabled": True, "period_s": 0.5, "replicas": {"min": 1, "max": 2, "up_s": 0.0}},
    }
    application = {"name": "pdmux", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    application["autoscaling_policy"] = {"policy_function": SCALING_POLICY}
    document = {"http_options": {"host": "127.0.0.1"}, "applications": [application]}
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = f"{sys.executable} -m pdmux_ray.serve.launch {config} --port {{port}} --proxy"
    with server.running(command, "demo") as started, ThreadPoolExecutor(REQUESTS) as clients:
        app, ends_s = App(started.url, "pdmux"), time.monotonic() + 40

        def busy(seed: int) -> None:
            while time.monotonic() < ends_s:
                ask(app, seed)

        load = [clients.submit(busy, seed) for seed in range(8)]
        wait_until(lambda: len(json.loads(httpx.get(f"{app.url}/admin/instances", timeout=30).text)["instances"]) == 2, 60)
        ends_s = 0.0
        for each in load:
            each.result()
