"""What Prometheus finds of a running application: who is there, and what each of them tells."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ray.conftest import App, replicas
from tests.ray.test_operation import wait_until

pytestmark = pytest.mark.ray

KEY = {"authorization": "Bearer first-key"}


def targets(app: App) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{app.url}/metrics/targets", headers=KEY, timeout=30).json()
    return found


def scraped(address: str) -> list[Any]:
    """Samples of a port."""
    answer = httpx.get(f"http://{address}/metrics", headers=KEY, timeout=30)
    assert answer.status_code == 200
    return [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]


def total(found: list[Any], name: str) -> float:
    return float(sum(sample.value for sample in found if sample.name == name))


def of(app: App, component: str) -> dict[str, list[Any]]:
    """Samples by the id of the process."""
    return {
        each["labels"]["instance"]: scraped(each["targets"][0])
        for each in targets(app)
        if each["labels"]["component"] == component
    }


def test_each_process_is_a_target_with_a_port_of_its_own_that_asks_for_the_key(keyed: App) -> None:
    assert httpx.get(f"{keyed.url}/metrics/targets", timeout=30).status_code == 401
    found = targets(keyed)
    labels = [each["labels"] for each in found]
    assert sorted(each["component"] for each in labels) == ["gateway", "instance", "instance"]
    assert {(each["app"], each["model"]) for each in labels} == {("app-keyed", "demo")}
    listed = httpx.get(f"{keyed.url}/admin/instances", headers=KEY, timeout=30).json()["instances"]
    assert {each["id"] for each in listed} == {each["instance"] for each in labels if each["component"] == "instance"}
    addresses = [address for each in found for address in each["targets"]]
    assert len(set(addresses)) == 3
    assert all(not address.startswith("0.0.0.0") for address in addresses)
    assert [httpx.get(f"http://{address}/metrics", timeout=30).status_code for address in addresses] == [401] * 3


def test_a_port_tells_exactly_what_was_served_and_not_who_tells_it(either: App) -> None:
    app = either
    (before,) = of(app, "gateway").values()
    body = {"model": "demo", "prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True}
    for _ in range(4):
        httpx.post(f"{app.url}/v1/completions", json=body, timeout=30)
    (after,), (instance,) = of(app, "gateway").values(), of(app, "instance").values()

    def more(name: str) -> float:
        return total(after, name) - total(before, name)

    assert (more("pdmux_generated_tokens_total"), more("pdmux_time_to_first_token_seconds_count")) == (20, 4)
    assert more("pdmux_first_token_stage_seconds_sum") == pytest.approx(more("pdmux_time_to_first_token_seconds_sum"))
    assert more("pdmux_slo_requests_total") == more("pdmux_time_per_output_token_seconds_count") == 4
    assert total(instance, "pdmux_pages") == total(instance, "pdmux_instance_pages")
    assert total(instance, "pdmux_role") == 1
    assert total(instance, "pdmux_step_seconds_count") == total(instance, "pdmux_steps_total")
    for sample in (*after, *instance):
        assert sample.labels.keys().isdisjoint({"instance", "gateway", "replica", "app", "model"})


def test_a_tier_that_is_not_configured_is_refused_and_auto_is_not(app: App) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    answers = [
        httpx.post(f"{app.url}/v1/completions", json=body | {"service_tier": tier}, timeout=30) for tier in ("auto", "gold")
    ]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert "default" in answers[1].json()["error"]["message"]


def test_instances_that_are_replaced_leave_no_series_behind(keyed: App) -> None:
    def ids() -> set[str]:
        return {each["labels"]["instance"] for each in targets(keyed) if each["labels"]["component"] == "instance"}

    def series() -> tuple[Counter[str], Counter[str]]:
        """How many of each name, on the front and on all ports."""
        front = httpx.get(f"{keyed.url}/metrics", headers=KEY, timeout=30).text
        ports = [scraped(address) for each in targets(keyed) for address in each["targets"]]
        named = [line.partition("{")[0].split()[0] for line in front.splitlines() if not line.startswith("#")]
        return Counter(named), Counter(sample.name for found in ports for sample in found)

    before = series()
    for _ in range(2):
        gone = ids()
        for pid in replicas(keyed, "Instance"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda gone=gone: len(ids()) == 2 and not ids() & gone, 90)  # type: ignore[misc]
        front = httpx.get(f"{keyed.url}/metrics", headers=KEY, timeout=30).text
        assert not [name for name in gone if name in front]
    keyed.wait_until_linked(2, key="first-key")
    assert series() == before
