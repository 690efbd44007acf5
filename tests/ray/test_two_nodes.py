"""A Ray of two nodes, each in namespaces of its own: one prefills, the other decodes, and the link between them is cut.

As on two machines nothing joins them but that link: neither loopback nor shared memory, process ids, Ray's session or the
folder of the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from pdmux_ray.bench.namespaces import SIDES, Namespaces, Side, why_not
from pdmux_ray.cache import cache_folder
from pdmux_ray.config import (
    IMPORT_PATH,
    AppConfig,
    FakeConfig,
    GatewayConfig,
    RoutingConfig,
    TopologyConfig,
    TransferConfig,
)
from pdmux_ray.generate import Generator
from pdmux_ray.types import Role, SamplingParams
from tests.ray.conftest import fake_engine, replicas
from tests.ray.test_disaggregated import Pair
from tests.ray.test_operation import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120, func_only=True),  # for the nodes to come up: START_S
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

DECODES: Side = 0  # Ray's head, and the gateway
PREFILLS: Side = 1
SILENCE_S = 4.0
CUT_S = 1.0  # TCP tries again after as long as it has waited already: a cut of so long is a silence of twice that
PORT = 8000
START_S = 150.0  # on a machine that is busy with other things; else 20
LOG_CHARS = 5000  # of each node's, shown when they do not come up
LAYERS, BYTES_PER_LAYER = 256, 16  # of a token's KV
WORDS = 300  # of a prompt: its prefill takes a second, its KV 1.2 MB
RATE_MBIT_S = 1000
KEPT = re.compile(r"timer:\(keepalive,[\d.]+(ms|sec),")  # within a minute
CONFIG = AppConfig(
    served_model_name="demo",
    topology=TopologyConfig(
        prefill=1,
        decode=1,
        ray_actor_options={Role.PREFILL: {"resources": {"far": 1}}, Role.DECODE: {"resources": {"near": 1}}},
    ),
    engine=fake_engine(
        fake=FakeConfig(step_s=0.01, prefill_s_per_token=0.003, layers=LAYERS, pages=256),
        mode="split",
        multiplex={"policy": "fixed", "block_layers": LAYERS // 16},
        prefix_cache=False,
        transfer=TransferConfig(silence_s=SILENCE_S, accept_s=SILENCE_S, drain_s=SILENCE_S, checksum=True),
    ),
    gateway=GatewayConfig(discovery_period_s=0.5, routing=RoutingConfig(policy="remote")),
)

# What process 1 of a node's namespaces runs: all others end with it.
START = (
    "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {hidden} && ray start --node-ip-address {address}"
    " --temp-dir {folder} --num-cpus 2 --object-store-memory 100000000 --resources '{resources}'"
)
HEAD = START + " --head --port 6379 --include-dashboard false && exec serve run --address {head}:6379 {folder}/config.yaml"
WORKER = START + " --address {head}:6379 --block"


class Nodes(Pair):
    """The application, asked inside the namespaces of the head."""

    def __init__(self, url: str, link: Namespaces, alone: Generator) -> None:
        super().__init__(url, "pdmux")
        self.link = link
        self._alone = alone
        self._clients = ThreadPoolExecutor(4)

    def send(self, seed: int, words: int = WORDS) -> Future[str]:
        return self._clients.submit(self.ask, seed, words)

    def ask(self, seed: int, words: int = WORDS) -> str:
        reply = httpx.post(f"{self.url}/v1/completions", json=body(seed, words), timeout=60)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    @contextmanager
    def streaming(self, seed: int, words: int = WORDS) -> Iterator[socket.socket]:
        """A client that has asked; its connection."""
        asked = json.dumps(body(seed, words) | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: pdmux\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}"
        with socket.create_connection((self.link.address(DECODES), PORT)) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + asked)
            yield client

    def alone(self, seed: int, words: int = WORDS) -> str:
        """What one instance says to it."""
        params = SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)
        return self._alone.generate([prompt(seed, words)], params)[0].text

    def total(self, name: str) -> float:
        return self.metric(f"pdmux_{name}")

    def every_page_is_free(self) -> bool:
        return self.total("instance_free_pages") == self.total("instance_pages")

    def asked_of_prefill(self) -> int:
        """Requests that the prefill instance works on, or will."""
        return sum(each["running"] + each["waiting"] for each in self.instances() if each["role"] == "prefill")

    def timers(self, side: Side) -> Iterator[tuple[tuple[str, str], str]]:
        """Of the node's TCP connections: own address and the other one, and what the kernel will do next by itself."""
        shown = self.link.inside(side, ["ss", "--tcp", "--numeric", "--options", "--no-header"])
        for line in subprocess.run(shown, capture_output=True, text=True, check=True).stdout.splitlines():
            _, _, _, here, there, *timer = line.split()
            yield (here, there), "".join(timer)

    def cut_amid_a_transfer(self) -> None:
        """When some of its bytes have crossed the link, and most have not."""
        _, before = self.link.counted(PREFILLS)
        wait_until(lambda: self.link.counted(PREFILLS)[1] - before > 100_000, 30)
        self.link.cut()

    def close(self) -> None:
        self._clients.shutdown()


def prompt(seed: int, words: int) -> str:
    return f"{seed}" + " word" * words


def body(seed: int, words: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt(seed, words), "seed": seed, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ExitStack() as stack:
        link = stack.enter_context(Namespaces())
        link.shape(RATE_MBIT_S)
        alone = stack.enter_context(Generator(CONFIG.model_copy(update={"topology": None})))
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmux-"))) for _ in SIDES]
        for of_side in ((DECODES, HEAD, "near"), (PREFILLS, WORKER, "far")):
            stack.enter_context(node(link, folders, *of_side))
        stack.enter_context(link.entered(DECODES))
        nodes = Nodes(f"http://{link.address(DECODES)}:{PORT}", link, alone)
        stack.callback(nodes.close)
        try:
            wait_until(lambda: answers(nodes.joined), START_S)
        except AssertionError:
            pytest.fail("\n\n".join((folder / "log").read_text(errors="replace")[-LOG_CHARS:] for folder in folders))
        yield nodes


@contextmanager
def node(link: Namespaces, folders: list[Path], side: Side, script: str, resource: str) -> Iterator[None]:
    """A node of the cluster. However this process ends, no other one of the node is left."""
    folder, hidden = folders[side], folders[1 - side]
    (folder / "models").symlink_to(cache_folder("models"))
    (folder / "config.yaml").write_text(yaml.safe_dump(document(link.address(DECODES))))
    told = {"address": link.address(side), "head": link.address(DECODES), "folder": folder, "hidden": hidden}
    shell = ["sh", "-c", script.format(**told, resources=json.dumps({resource: 2}))]
    alone = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", *shell]
    command = ["setpriv", "--pdeathsig", "KILL", *link.inside(side, alone)]
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(command, stdout=log, stderr=log, env=environment(folder))
    try:
        yield
    finally:
        processes = [process, *process.children(recursive=True)]
        process.kill()
        _, left = psutil.wait_procs(processes, timeout=10)
        assert not left


def environment(folder: Path) -> dict[str, str]:
    """Of a node. Without the first two anybody who reaches Ray's ports can run code."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "UCX_"))}
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    return kept | ray | {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "PDMUX_CACHE": str(folder)}


def document(head: str) -> dict[str, Any]:
    """The Serve config file."""
    gateway = {"name": "Gateway", "ray_actor_options": {"num_cpus": 0, "resources": {"near": 0.01}}}
    application = {"name": "pdmux", "route_prefix": "/", "import_path": IMPORT_PATH, "args": CONFIG.model_dump(mode="json")}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": head, "port": PORT},
        "applications": [application | {"deployments": [gateway]}],
    }


def answers(condition: Callable[[], bool]) -> bool:
    """Whether it holds; not while the server does not answer."""
    try:
        return condition()
    except (httpx.TransportError, ValueError, KeyError):
        return False


@pytest.fixture
def nodes(cluster: Nodes) -> Iterator[Nodes]:
    """Linked, and without a page that is not free, before a test and after it; and still the instances of before."""
    wait_until(cluster.joined, 30)
    instances = {each["id"] for each in cluster.instances()}
    yield cluster
    cluster.link.heal()
    wait_until(cluster.joined, 30)
    wait_until(cluster.every_page_is_free, 30)
    assert {each["id"] for each in cluster.instances()} == instances


def test_kv_crosses_the_link_and_answers_are_those_of_one_instance(nodes: Nodes) -> None:
    hosts = {each["role"]: each["kv_address"].partition(":")[0] for each in nodes.instances()}
    assert hosts == {"decode": nodes.link.address(DECODES), "prefill": nodes.link.address(PREFILLS)}
    landed, bytes_before, (_, sent) = (
        nodes.fetches("landed"),
        nodes.total("kv_landed_bytes_total"),
        nodes.link.counted(PREFILLS),
    )
    for seed in range(3):
        assert nodes.ask(seed) == nodes.alone(seed)
    wait_until(lambda: nodes.fetches("landed") == landed + 3, 30)
    moved = nodes.total("kv_landed_bytes_total") - bytes_before
    assert nodes.link.counted(PREFILLS)[1] - sent >= moved >= 3 * WORDS * LAYERS * BYTES_PER_LAYER


def test_no_connection_that_kv_takes_is_idle_for_so_long_that_a_router_would_forget_it(nodes: Nodes) -> None:
    """The line has its heartbeats. UCX's own connections are idle between two transfers, but whoever has called keeps them."""
    (decodes,) = replicas(nodes, "Instance-decode")
    (line,) = (each["kv_address"] for each in nodes.instances() if each["role"] == "prefill")
    far = nodes.link.address(PREFILLS)
    connections = [each for each in psutil.Process(decodes).net_connections("tcp") if each.raddr and each.raddr.ip == far]
    ends = {(f"{each.laddr.ip}:{each.laddr.port}", f"{far}:{each.raddr.port}") for each in connections}
    idle = {(here, there) for here, there in ends if there != line}
    timers = {ends: timer for side in SIDES for ends, timer in nodes.timers(side)}
    kept = {(here, there) for here, there in idle if KEPT.match(timers[here, there]) or KEPT.match(timers[there, here])}
    assert kept == idle != set(), f"beside {line}: {timers}"


def test_a_cut_that_is_shorter_than_the_patience_costs_time_only(nodes: Nodes) -> None:
    landed, silent = nodes.fetches("landed"), nodes.total("kv_silent_peers_total")
    stays = nodes.send(11)
    with nodes.streaming(12):
        wait_until(lambda: nodes.asked_of_prefill() == 2, 30)
        nodes.cut_amid_a_transfer()
        begin_s = time.monotonic()
    wait_until(lambda: nodes.total("instance_quarantined_pages") > 0, SILENCE_S / 2)
    time.sleep(max(0.0, begin_s + CUT_S - time.monotonic()))
    assert nodes.total("instance_quarantined_pages") > 0, "nobody has said that the peer writes no more"
    nodes.link.heal()
    assert stays.result() == nodes.alone(11)
    wait_until(nodes.every_page_is_free, 30)
    wait_until(lambda: nodes.fetches("landed") == landed + 1, 30)
    assert nodes.total("kv_silent_peers_total") == silent


def test_while_the_link_is_cut_prompts_are_prefilled_where_they_are_decoded_and_afterwards_fetched_again(nodes: Nodes) -> None:
    lost, quarantines, alone = nodes.fetches("peer_silent"), nodes.total("kv_quarantines_total"), nodes.routes("no_prefill_fit")
    under_way = nodes.send(21)
    nodes.cut_amid_a_transfer()
    assert under_way.result() == nodes.alone(21)
    wait_until(lambda: nodes.fetches("peer_silent") == lost + 1, 30)
    wait_until(lambda: nodes.total("kv_quarantines_total") == quarantines + 1, 30)
    assert nodes.ask(22, words=20) == nodes.alone(22, words=20)
    assert nodes.routes("no_prefill_fit") == alone + 1
    nodes.link.heal()
    wait_until(nodes.joined, 30)
    wait_until(nodes.every_page_is_free, 30)
    landed = nodes.fetches("landed")
    assert nodes.ask(23) == nodes.alone(23)
    wait_until(lambda: nodes.fetches("landed") == landed + 1, 30)
