"""One machine: deploy/compose.yaml and what it hands to Prometheus and Grafana."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from pdmux_ray.config import load_app_config
from tests.local.deploy.files import DEPLOY, ROOT, check, document

COMPOSE = document("compose.yaml")
SERVICES = COMPOSE["services"]
PROMETHEUS = document("prometheus/prometheus.yml")
DATASOURCES = document("grafana/provisioning/datasources/prometheus.yaml")
PROVIDERS = document("grafana/provisioning/dashboards/pdmux.yaml")
IN_IMAGE = "/opt/pdmux-ray/"


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_the_compose_files_are_what_the_specification_allows(file: str) -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(document(file), json.loads(schema.read_text(encoding="utf-8")))


def test_the_provisioning_of_grafana_is_what_grafana_takes() -> None:
    check(DATASOURCES, "datasources")
    check(PROVIDERS, "providers")


def published() -> list[str]:
    return [port for service in SERVICES.values() for port in service.get("ports", [])]


def test_nothing_is_published_beyond_this_machine() -> None:
    assert published() != []
    assert [port for port in published() if not port.startswith("127.0.0.1:")] == []


def test_every_service_runs_without_privileges() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service


def test_secrets_come_from_the_environment_of_whoever_starts_it() -> None:
    used = {s if isinstance(s, str) else s["source"] for service in SERVICES.values() for s in service.get("secrets", [])}
    assert used == COMPOSE["secrets"].keys()
    assert all(secret.keys() == {"environment"} for secret in COMPOSE["secrets"].values())


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> file or folder here."""
    pairs = [volume.split(":")[:2] for volume in SERVICES[service]["volumes"]]
    return {there: (DEPLOY / here).resolve() for here, there in pairs if here.startswith(".")}


def here(service: str, path: str) -> Path:
    """What a path in the container is."""
    there = next(there for there in mounts(service) if path == there or path.startswith(f"{there}/"))
    return mounts(service)[there] / path.removeprefix(there).lstrip("/")


def test_everything_that_is_mounted_or_built_from_exists() -> None:
    assert [path for service in ("prometheus", "grafana") for path in mounts(service).values() if not path.exists()] == []
    build = SERVICES["pdmux"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_the_config_that_is_served_is_in_the_image_and_valid(file: str) -> None:
    *command, config = document(file)["services"]["pdmux"]["command"]
    assert command == ["python", "-m", "pdmux_ray.serve.launch"]
    loaded = load_app_config(ROOT / config.removeprefix(IN_IMAGE))
    assert f"export {loaded.gateway.api_keys_env}=" in SERVICES["pdmux"]["entrypoint"][2]


def test_every_port_that_is_published_is_one_that_somebody_listens_on() -> None:
    served = document("serve/cpu.yaml")["http_options"]["port"]
    assert sorted(published()) == sorted(f"127.0.0.1:{port}:{port}" for port in (served, 9090, 3000))
    assert str(served) in SERVICES["pdmux"]["healthcheck"]["test"][-1]
    assert DATASOURCES["datasources"][0]["url"] == "http://pdmux:9090"  # in whose network Prometheus lives
    assert SERVICES["prometheus"]["network_mode"] == "service:pdmux"


def test_prometheus_asks_the_front_whom_to_scrape_with_the_servers_key() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    assert discovery["url"] == "http://127.0.0.1:8000/metrics/targets"
    config = here("prometheus", SERVICES["prometheus"]["command"][0].removeprefix("--config.file="))
    assert config == DEPLOY / "prometheus/prometheus.yml"
    (secret,) = SERVICES["prometheus"]["secrets"]
    for key in (job["authorization"], discovery["authorization"]):
        assert secret["target"] == f"/pdmux/deploy/prometheus/{key['credentials_file']}"


def test_the_rules_are_where_prometheus_looks_for_them_in_the_container_and_here() -> None:
    (rules,) = PROMETHEUS["rule_files"]
    assert (DEPLOY / "prometheus" / rules).resolve() == ROOT / "dashboards/rules.yaml"
    assert here("prometheus", "/pdmux/dashboards/rules.yaml").is_file()


def test_grafana_finds_dashboards_that_ask_its_own_data_source() -> None:
    folder = here("grafana", PROVIDERS["providers"][0]["options"]["path"])
    dashboards = sorted(folder.glob("*.json"))
    assert dashboards != []
    (source,) = DATASOURCES["datasources"]
    for dashboard in dashboards:
        text = dashboard.read_text(encoding="utf-8")
        assert set(re.findall(r'"uid": "([^"]*)"', text)) & {source["uid"], "${datasource}"}, dashboard.name
