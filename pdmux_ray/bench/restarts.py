"""`python -m pdmux_ray.bench.restarts [--count N]`: are there as many series after instances were replaced many times?

Starts a server on the fake device in a Ray of its own, kills every instance at once (SIGKILL) until `--count` have been
replaced, and counts before and after: targets, series on their ports, series on the front, and what Ray exports on its own
port, of the figures that are mirrored there and in all. Exits with 1 when the counts of the first three differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import psutil

from pdmux_ray.bench.server import free_port
from pdmux_ray.config import AppConfig, EngineConfig, FakeConfig, GatewayConfig
from pdmux_ray.errors import PdmuxError

APP = "restarts"
REPLACED_S = 120.0  # until killed instances are back
ANSWER_S = 60.0  # the front, and every port
RAY_FORGETS_S = 60.0  # for gauges of processes that have ended
_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there are at one moment."""

    targets: int  # on /metrics/targets
    ports: int  # series on all of their ports
    front: int  # on the front's /metrics
    mirrored: int  # series of ours in Ray's export
    names: int  # instances and gateways that those are of
    ray: int  # all series of Ray's export


def series(text: str) -> list[str]:
    """Of an exposition, without their values."""
    return [line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")]


@dataclass(frozen=True, slots=True)
class Served:
    """A running application."""

    url: str
    ray_port: int
    instances: int

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(_get(f"{self.url}/metrics/targets"))
        return found

    def ids(self) -> set[str]:
        """Of the instances that are targets."""
        return {each["labels"]["instance"] for each in self.targets() if each["labels"]["component"] == "instance"}

    def counts(self) -> Counts:
        targets, ray = self.targets(), series(_get(f"http://127.0.0.1:{self.ray_port}/metrics"))
        ports = [f"http://{address}/metrics" for each in targets for address in each["targets"]]
        mirrored = [line for line in ray if line.startswith("ray_pdmux_")]
        names = {found for line in mirrored for found in re.findall(r'[{,]replica="([^"]*)"', line)}
        front = len(series(_get(f"{self.url}/metrics")))
        return Counts(len(targets), sum(len(series(_get(port))) for port in ports), front, len(mirrored), len(names), len(ray))

    def wait_for_others_than(self, before: set[str]) -> set[str]:
        """Until as many instances as there should be are linked, none of them of before. Raises PdmuxError."""
        end_s = time.monotonic() + REPLACED_S
        while time.monotonic() < end_s:
            found = self.ids()
            if len(found) == self.instances and not found & before:
                return found
            time.sleep(_PERIOD_S)
        raise PdmuxError(f"{self.instances} instances were not there again within {REPLACED_S:g} s; look at Ray's logs.")


def replica_pids(app: str, deployment: str) -> list[int]:
    """Of an application's replicas of that deployment, below this process."""
    title = f"ray::ServeReplica:{app}:{deployment}"
    return [process.pid for process in psutil.Process().children(recursive=True) if title in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return ""


def _get(url: str) -> str:
    """Raises PdmuxError when nobody answers for ANSWER_S."""
    end_s = time.monotonic() + ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
                text: str = response.read().decode()
                return text
        except OSError as error:
            if time.monotonic() > end_s:
                raise PdmuxError(f"{url} does not answer: {error}") from None
        time.sleep(_PERIOD_S)


@contextmanager
def served(instances: int) -> Iterator[Served]:
    """The application on the fake device, in a Ray of its own, until the end."""
    import ray
    from ray import serve

    from pdmux_ray.serve.app import build_app

    fake = EngineConfig(device="fake", context_length=512, fake=FakeConfig(step_s=0.02))
    config = AppConfig(instances=instances, engine=fake, gateway=GatewayConfig(discovery_period_s=0.5))
    port, ray_port = free_port(), free_port()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False, _metrics_export_port=ray_port)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build_app(config), name=APP)
        yield Served(f"http://127.0.0.1:{port}", ray_port, instances)
    finally:
        serve.shutdown()
        ray.shutdown()


def replaced(server: Served, count: int) -> Iterator[int]:
    """Kills instances until so many have been replaced; how many have been, after each round."""
    known, done = server.wait_for_others_than(set()), 0
    while done < count:
        victims = replica_pids(APP, "Instance")[: count - done]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        left = set() if len(victims) < server.instances else known
        known = server.wait_for_others_than(left)
        done += len(victims)
        yield done


def report(before: Counts, after: Counts, restarts: int) -> bool:
    """Prints the table. Whether ours stayed as many."""
    print(f"{'':36} {'before':>8} {'after ' + str(restarts) + ' restarts':>20}")
    words = {
        "targets": "targets (processes)",
        "ports": "series on their ports",
        "front": "series on the front",
        "mirrored": "Ray's export: series mirrored there",
        "names": "  replicas that these are of",
        "ray": "  all series of Ray's export",
    }
    for field in fields(Counts):
        print(f"{words[field.name]:36} {getattr(before, field.name):>8} {getattr(after, field.name):>20}")
    return all(getattr(before, name) == getattr(after, name) for name in ("targets", "ports", "front"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100, help="restarts in all")
    parser.add_argument("--instances", type=int, default=4, help="all of them are killed at once")
    args = parser.parse_args()
    with served(args.instances) as server:
        server.wait_for_others_than(set())
        time.sleep(2 * RAY_FORGETS_S / 3)  # Ray exports ours after its first period or two
        before = server.counts()
        for done in replaced(server, args.count):
            print(f"{done} of {args.count}", file=sys.stderr, flush=True)
        time.sleep(RAY_FORGETS_S)
        kept = report(before, server.counts(), args.count)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
