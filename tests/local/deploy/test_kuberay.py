"""Kubernetes: deploy/kuberay, and deploy/haproxy.env, from which its ConfigMap is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pdmux_ray import __version__
from pdmux_ray.config import AppConfig, GatewayConfig, load_serve_config
from pdmux_ray.serve import modes
from tests.local.deploy.files import DEPLOY, ROOT, check, document, documents, environment

SERVICE = document("kuberay/rayservice.yaml")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
POLICY = document("kuberay/networkpolicy.yaml")
SCRAPES, PODS = documents("kuberay/monitoring.yaml")
TEMPLATES = [group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]
CONTAINERS = [container for template in TEMPLATES for container in template["spec"]["containers"]]
KUBERNETES = "1.33"


def served(tmp_path: Path) -> tuple[dict[str, Any], AppConfig]:
    """The config file that the service has inside."""
    (path := tmp_path / "serve.yaml").write_text(SERVICE["spec"]["serveConfigV2"], encoding="utf-8")
    return load_serve_config(path)


@pytest.mark.parametrize("resource", [SERVICE, SCRAPES, PODS], ids=lambda resource: resource["kind"])
def test_the_custom_resources_have_the_form_of_their_definitions(resource: dict[str, Any]) -> None:
    check(resource, resource["kind"])


def test_a_key_that_no_definition_has_is_found() -> None:
    with pytest.raises(jsonschema.ValidationError, match="serveConfig"):
        check({**SERVICE, "spec": {**SERVICE["spec"], "serveConfig": ""}}, "RayService")


@pytest.mark.parametrize("template", TEMPLATES, ids=["head", "worker"])
def test_the_pods_are_what_kubernetes_takes(template: dict[str, Any]) -> None:
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)


def test_the_network_policy_is_what_kubernetes_takes() -> None:
    kubernetes_validate.validate(POLICY, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="ingres"):
        kubernetes_validate.validate({**POLICY, "spec": {**POLICY["spec"], "ingres": []}}, KUBERNETES, strict=True)


@pytest.mark.parametrize("template", TEMPLATES, ids=["head", "worker"])
def test_no_pod_is_privileged_and_each_has_limits(template: dict[str, Any]) -> None:
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["spec"]["automountServiceAccountToken"] is False
    for container in template["spec"]["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_every_pod_runs_the_image_of_this_release_with_the_ray_that_is_pinned() -> None:
    assert {container["image"] for container in CONTAINERS} == {f"pdmux-ray:{__version__}-gpu"}
    assert f"ray=={CLUSTER['rayVersion']}" in (ROOT / "deploy/requirements/base.txt").read_text(encoding="utf-8").split()


def test_what_it_serves_is_valid_and_fits_its_gpus(tmp_path: Path) -> None:
    _, config = served(tmp_path)
    (workers,) = CLUSTER["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert config.engine.device == "cuda"
    assert len(config.roles) == workers["replicas"] * int(limits["nvidia.com/gpu"])


def test_every_variable_that_the_config_names_is_a_secret_of_every_pod(tmp_path: Path) -> None:
    _, config = served(tmp_path)
    for container in CONTAINERS:
        secret = {variable["name"]: variable["valueFrom"]["secretKeyRef"]["key"] for variable in container["env"]}
        assert secret == {config.gateway.api_keys_env: "api_keys", config.engine.transfer.secret_env: "transfer_secret"}


def test_files_that_the_config_names_lie_in_volumes_that_are_mounted(tmp_path: Path) -> None:
    _, config = served(tmp_path)
    for template in TEMPLATES:
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounted = template["spec"]["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounted} == volumes
        for path in (config.model, str(config.engine.multiplex.profile)):
            assert any(path.startswith(f"{mount['mountPath']}/") for mount in mounted)


def test_the_old_cluster_outlives_the_longest_answer(tmp_path: Path) -> None:
    _, config = served(tmp_path)
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= config.gateway.request_timeout_s


def test_ports_that_are_named_elsewhere_are_ports_of_the_pods(tmp_path: Path) -> None:
    document, _ = served(tmp_path)
    named = {port["name"]: port["containerPort"] for container in CONTAINERS for port in container["ports"]}
    assert {endpoint["port"] for endpoint in PODS["spec"]["podMetricsEndpoints"]} <= named.keys()
    assert named["serve"] == document["http_options"]["port"]
    (discovery,) = SCRAPES["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://{SERVICE['metadata']['name']}-serve-svc.default.svc:{named['serve']}/metrics/targets"
    allowed = [port for rule in POLICY["spec"]["ingress"] for port in rule.get("ports", [])]
    assert {port["port"] for port in allowed if "endPort" not in port} <= set(named.values())


def test_clients_reach_the_http_port_alone() -> None:
    (clients,) = [rule for rule in POLICY["spec"]["ingress"] if "pdmux-client" in str(rule)]
    assert clients["ports"] == [{"port": 8000}]
    everybody = [rule for rule in POLICY["spec"]["ingress"] if not rule.get("from")]
    assert everybody == []


def test_prometheus_reaches_the_ports_of_metrics_alone_and_from_labelled_namespaces() -> None:
    (rule,) = [rule for rule in POLICY["spec"]["ingress"] if "prometheus" in str(rule)]
    (where,) = rule["from"]
    assert where["namespaceSelector"]["matchLabels"] == {"pdmux-monitoring": "true"}
    reached = [range(port["port"], port.get("endPort", port["port"]) + 1) for port in rule["ports"]]
    named = {port["name"]: port["containerPort"] for container in CONTAINERS for port in container["ports"]}
    assert {name for name, port in named.items() if any(port in each for each in reached)} == {
        *(endpoint["port"] for endpoint in PODS["spec"]["podMetricsEndpoints"]),
        "serve",  # which lists the others
    }


def test_the_pods_are_those_that_policy_and_monitor_select() -> None:
    for selector in (POLICY["spec"]["podSelector"], PODS["spec"]["selector"]):
        for template in TEMPLATES:
            assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_whoever_reaches_rays_ports_needs_its_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_prometheus_sends_a_key_of_the_same_secret() -> None:
    assert SCRAPES["spec"]["authorization"] == SCRAPES["spec"]["httpSDConfigs"][0]["authorization"]
    assert SCRAPES["spec"]["authorization"]["credentials"] == {"name": "pdmux", "key": "prometheus_api_key"}


def test_the_rules_for_the_operator_are_the_rules() -> None:
    rule = document("kuberay/prometheusrule.yaml")
    check(rule, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "dashboards/rules.yaml").read_text(encoding="utf-8"))


def test_the_environment_of_haproxy_is_the_one_that_scripts_serve_sets() -> None:
    """But for ports, which are free ones there, and for paths, which are those of the image."""
    ours, theirs = environment("haproxy.env"), modes.environment("haproxy", GatewayConfig())
    where = re.compile(r"_PORT$|_PATH$|^PDMUX_HAPROXY_BINARY$")
    assert {k: v for k, v in ours.items() if not where.search(k)} == {k: v for k, v in theirs.items() if not where.search(k)}
    assert ours.keys() == {key for key in theirs if "FALLBACK" not in key}
    script = ours["RAY_SERVE_HAPROXY_BINARY_PATH"].removeprefix("/opt/pdmux-ray/")
    assert Path(theirs["RAY_SERVE_HAPROXY_BINARY_PATH"]) == ROOT / script
    assert ours["PDMUX_HAPROXY_BINARY"] in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def test_the_documented_commands_make_the_secret_and_the_map_that_the_pods_use() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--from-literal=(\w+)=", text)) == {"api_keys", "prometheus_api_key", "transfer_secret"}
    (map_name,) = {source["configMapRef"]["name"] for container in CONTAINERS for source in container["envFrom"]}
    assert f"kubectl create configmap {map_name} --from-env-file=deploy/haproxy.env" in text
    applied = set(re.findall(r"-f (deploy/kuberay/\S+\.yaml)", text))
    assert applied == {str(path.relative_to(ROOT)) for path in (DEPLOY / "kuberay").glob("*.yaml")}
