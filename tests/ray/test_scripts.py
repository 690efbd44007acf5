"""`scripts/serve` as a person uses it: from the command to the answer, and to nothing left behind."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from pdmux_ray.bench.server import free_port
from pdmux_ray.model.source import resolve
from pdmux_ray.serve import descendants

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
Launch = Callable[..., "Launched"]


class Launched:
    """One run of scripts/serve."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        """`folder` takes the logs that a failed start leaves."""
        self.output = ""
        self._before = set(descendants.living())
        self.process = subprocess.Popen(
            [str(ROOT / "scripts" / "serve"), *map(str, arguments)],
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Its process tree, alive."""
        with contextlib.suppress(psutil.Error):
            return [self.process_itself(), *descendants.living(self.process_itself())]
        return []

    def left_behind(self) -> set[psutil.Process]:
        """Once it has ended, and if no other was started since: what is alive of it."""
        return set(descendants.living()) - self._before

    def process_itself(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def wait_for(self, text: str) -> str:
        """Reads output up to the line that has `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in the output:\n{self.output}")

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts servers. At the end nothing of them is left: what a launcher leaves behind becomes this process's child."""
    descendants.adopt_orphans()
    before = set(descendants.living())
    launched: list[Launched] = []
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are too deep for the names of Ray's sockets

    def start(*arguments: object) -> Launched:
        launched.append(Launched(folder, *arguments))
        return launched[-1]

    yield start
    for server in launched:
        server.process.terminate()  # of a test that failed
    left = wait_until_gone(before, 60)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for server in launched:
        server.process.communicate()
    shutil.rmtree(folder)
    assert left == set()


def wait_until_gone(before: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := set(descendants.living()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The demo model's tokenizer over the fake device: starts without loading weights."""
    return write_config(tmp_path, {"model": "demo", "engine": {"device": "fake", "fake": {"step_s": 0.001}}})


def write_config(directory: Path, args: dict[str, object]) -> Path:
    document = yaml.safe_load((ROOT / "configs" / "cpu-demo.yaml").read_text())
    document["applications"][0]["args"] = args
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def status_of_a_chat(port: int) -> int:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return int(response.status)


def listening_addresses(server: Launched) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = []
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            found += [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [ipaddress.ip_address(ip.removeprefix("::ffff:")) for ip in found]


def test_two_servers_share_a_machine_keep_to_loopback_and_end_without_a_trace(launch: Launch, config: Path) -> None:
    ports = free_port(), free_port()
    haproxy, proxy = launch(config, "--port", ports[0]), launch(config, "--port", ports[1], "--proxy")
    assert "HAProxy in front" in haproxy.wait_for("serves 'demo'")
    assert "own proxy in front" in proxy.wait_for("serves 'demo'")
    assert f"curl http://127.0.0.1:{ports[0]}/v1/chat/completions" in haproxy.wait_for("curl")
    assert any("haproxy" in p.name() for p in haproxy.processes())
    assert not any("haproxy" in p.name() for p in proxy.processes())
    assert [status_of_a_chat(port) for port in ports] == [200, 200]
    assert [a for server in (haproxy, proxy) for a in listening_addresses(server) if not a.is_loopback] == []

    haproxy.process.send_signal(signal.SIGINT)
    assert haproxy.wait() == 0
    assert status_of_a_chat(ports[1]) == 200
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.wait() == 0


@pytest.mark.parametrize("processes", [1, 2, 6, 12])
def test_a_signal_during_the_start_leaves_no_process(launch: Launch, config: Path, processes: int) -> None:
    server = launch(config, "--port", free_port())
    while len(server.processes()) < processes:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    server.wait()
    assert server.left_behind() == set()


def test_a_killed_supervisor_takes_its_server_along(launch: Launch, config: Path) -> None:
    """The fixture checks, at the end, that nothing is left."""
    server = launch(config, "--port", free_port())
    server.wait_for("curl")
    server.process.kill()
    server.wait()


def test_a_wrong_config_is_refused_before_anything_starts(launch: Launch, tmp_path: Path) -> None:
    server = launch(write_config(tmp_path, {"model": "demo", "engine": {"modus": "chunked"}}))
    assert server.wait() == 2
    assert "engine.modus" in server.output
    assert "Traceback" not in server.output


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch, config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = launch(config, "--port", taken.getsockname()[1])
        assert server.wait() == 2
    assert "choose another with --port" in server.output


def test_a_model_that_cannot_be_served_ends_the_start_with_its_reason(launch: Launch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in resolve("demo").iterdir():
        (model / file.name).symlink_to(file)
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(hf | {"hidden_act": "gelu"}))
    server = launch(write_config(tmp_path, {"model": str(model), "engine": {"device": "cpu"}}), "--port", free_port())
    assert server.wait() == 1
    assert "UnsupportedModelError" in server.output
    assert "gelu" in server.output
    assert server.left_behind() == set()
