"""What `scripts/serve` makes of its arguments and config file, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdmux_ray.bench.server import free_port
from pdmux_ray.config import GatewayConfig
from pdmux_ray.device.gpus import has_gpu
from pdmux_ray.errors import ConfigError
from pdmux_ray.serve.launch import Plan, make_plan, parser
from pdmux_ray.serve.modes import environment

CONFIGS = Path(__file__).parents[3] / "configs"


def plan(tmp_path: Path, http: str, *arguments: str) -> Plan:
    """Of a file whose `http_options` are `http`."""
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"http_options: {http}\napplications: [{{name: a, import_path: pdmux_ray.serve.app:build_app, args: {{}}}}]"
    )
    return make_plan(parser().parse_args([str(path), *arguments]), tmp_path)


def test_the_port_of_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    port = free_port()
    assert plan(tmp_path, "{host: 127.0.0.1, port: 1}", "--port", str(port)).url == f"http://127.0.0.1:{port}"
    assert plan(tmp_path, f"{{port: {port}}}").url == f"http://127.0.0.1:{port}"


def test_without_a_host_only_this_machine_is_served(tmp_path: Path) -> None:
    for http in ("", "{host: }"):
        assert plan(tmp_path, http, "--port", str(free_port())).document["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("http", ["[1]", "text", "{port: abc}", "{port: 0}", "{port: 65536}", "{port: true}"])
def test_http_options_that_make_no_sense_are_refused(tmp_path: Path, http: str) -> None:
    with pytest.raises(ConfigError, match=r"http_options is not a group|must be a number from 1 to 65535"):
        plan(tmp_path, http)


def test_tls_that_no_front_would_speak_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http_options has ssl_certfile, ssl_keyfile, but .* plain HTTP"):
        plan(tmp_path, "{ssl_keyfile: k.pem, ssl_certfile: c.pem}", "--port", str(free_port()))


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_that_is_none_is_refused_on_the_command_line_too(tmp_path: Path, port: str) -> None:
    with pytest.raises(ConfigError, match="must be a number from 1 to 65535"):
        plan(tmp_path, "{port: 8000}", f"--port={port}")


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0"])
def test_a_port_is_looked_for_on_the_configs_own_host(tmp_path: Path, host: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken, pytest.raises(ConfigError, match="choose another with --port"):
        plan(tmp_path, f"{{host: {host}, port: {taken.getsockname()[1]}}}")


def test_a_host_that_is_not_this_machines_is_refused(tmp_path: Path) -> None:
    for host in ("192.0.2.1", "no..host"):
        with pytest.raises(ConfigError, match="cannot be had"):
            plan(tmp_path, f"{{host: {host}, port: 8000}}")


def test_haproxy_keeps_a_connection_as_long_as_an_answer_may_take() -> None:
    variables = environment("haproxy", GatewayConfig(request_timeout_s=1234.5))
    assert variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "1235"


def test_a_missing_api_key_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--port", str(free_port()), "--set", "gateway.api_keys_env=PDMUX_TEST_NO_SUCH_KEYS")
    for value in (None, "", " , "):
        if value is not None:
            monkeypatch.setenv("PDMUX_TEST_NO_SUCH_KEYS", value)
        with pytest.raises(ConfigError, match=r"holds no key.* in the environment of scripts/serve"):
            plan(tmp_path, "", *arguments)
    monkeypatch.setenv("PDMUX_TEST_NO_SUCH_KEYS", "a, b")
    assert plan(tmp_path, "", *arguments).config.gateway.api_keys_env == "PDMUX_TEST_NO_SUCH_KEYS"


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_config_for_a_gpu_is_refused_without_one_and_the_cpus_is_named(tmp_path: Path) -> None:
    arguments = parser().parse_args([str(CONFIGS / "1gpu-mux.yaml"), "--port", str(free_port())])
    with pytest.raises(ConfigError, match=r"configs/cpu-mux\.yaml"):
        make_plan(arguments, tmp_path)
