"""The servers that the comparisons of modes start: names, what each sets, and the profile that those with lanes plan by."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.console import Console

from pdmux_ray.bench import server
from pdmux_ray.bench.load import targets
from pdmux_ray.bench.load.client import Target
from pdmux_ray.bench.load.generator import run as run_loop
from pdmux_ray.config import load_serve_config
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.report.table import print_line

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "scripts" / "serve"
CONFIG = ROOT / "configs" / "cpu-demo.yaml"
TABLE = ROOT / "configs" / "tables" / "sglang-2-cores.yaml"

PEER = "peer"
AUTO = "auto"
YARDSTICK = "prefill_first"  # its latencies when idle make the objectives, and what it carries makes the rates
START_S = 20.0  # for forecasts: a server's start and end
PEER_START_S = 60.0
PROFILE_S = 600.0
LEAST_TTFT_S = 0.001  # a line through measured TTFTs may begin at 0, which no configuration takes

# Name -> keys of `engine.` that it sets.
ONE_PASS = {
    "prefill_first": ("mode=prefill_first",),
    "chunked-64": ("mode=chunked", "chunk_tokens=64"),
    "chunked-128": ("mode=chunked", "chunk_tokens=128"),
    "chunked-256": ("mode=chunked", "chunk_tokens=256"),
    "chunked-512": ("mode=chunked", "chunk_tokens=512"),
}
BY_PROFILE = {name: (f"mode={name}",) for name in ("split", "capped", "time_shared", AUTO)}
BY_RULE = {
    "sglang": ("mode=split", "multiplex.policy=sglang", f"multiplex.table={TABLE}"),
    "half": ("mode=split", "multiplex.policy=fixed"),
}
NAMES = (*ONE_PASS, *BY_PROFILE, *BY_RULE)
FIXED = tuple(name for name in (*ONE_PASS, *BY_PROFILE) if name != AUTO)  # modes that AUTO must be as good as


def chosen(text: str, peer: str | None, others: Sequence[str] = NAMES) -> list[str]:
    """The names of a list with commas, each once; `peer` may be among them when it has a command. Raises ConfigError."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in (*others, PEER)]:
        raise ConfigError(f"there is no target {unknown[0]!r}. Use {', '.join(others)} and, with --peer COMMAND, {PEER}.")
    if PEER in names and not peer:
        raise ConfigError("the target 'peer' needs --peer COMMAND.")
    return names


def end_in_order() -> None:
    """SIGTERM ends the command as Ctrl-C does: the servers that it has started must not outlive it."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def have_lanes(names: Sequence[str]) -> bool:
    """Whether one of them does, and so gets a profile: to plan by, or so that its steps can be judged."""
    return any(name in BY_PROFILE or name in BY_RULE for name in names)


def start_s(names: Sequence[str]) -> float:
    """For forecasts: all of these, one after the other."""
    return sum(PEER_START_S if name == PEER else START_S for name in names)


def command(name: str, profile: Path | None = None, slo: Slo | None = None, peer: str | None = None) -> str:
    """What starts the server, with {model} and {port} left open. Those with lanes get the profile and the objectives; the
    published rule and the fixed split do not decide by them, but predict, so that their steps can be judged, too."""
    if name == PEER and peer:
        return peer
    words = [str(SERVE), "--set", "model={model}", "--port", "{port}"]
    settings = list((ONE_PASS | BY_PROFILE | BY_RULE)[name])
    if name not in ONE_PASS and profile is not None:
        settings.append(f"multiplex.profile={profile.resolve()}")
    if name in BY_PROFILE and slo is not None:
        settings += objectives(slo)
    for setting in settings:
        words += ["--set", f"engine.{setting}"]
    return shlex.join(words)


def objectives(slo: Slo) -> list[str]:
    """The keys of `engine.` that set them."""
    return [f"multiplex.{key}={value:.6f}" for key, value in limits(slo).items()]


def limits(slo: Slo) -> dict[str, float]:
    """The keys of `engine.multiplex` that set them, and their values."""
    ttft_s = None if slo.ttft_s is None else max(slo.ttft_s, LEAST_TTFT_S)
    found = {"itl_s": slo.itl_s, "ttft_s": ttft_s, "ttft_s_per_token": slo.ttft_s_per_token}
    return {key: value for key, value in found.items() if value is not None}


@contextmanager
def served(command: str, model: Path) -> Iterator[Target]:
    """The command's server, as it wants to be asked. Raises PdmuxError when it does not start or answer."""
    with server.running(command, str(model)) as started:
        name = run_loop(targets.choose_model(started.url, None, None))
        yield run_loop(targets.checked(Target(started.url, name)))


def profile_for(names: Sequence[str], given: Path | None, model: Path, out: Path, console: Console) -> Path | None:
    """The profile that these targets plan by: the one given, or a new one in `out`; None when they need none. Raises
    PdmuxError."""
    return profile_of(CONFIG, given, model, out, console) if given is not None or have_lanes(names) else None


def profile_of(served: Path, given: Path | None, model: Path, out: Path, console: Console) -> Path:
    """The profile of an instance of the config file `served`: the one given, or a new one in `out`. Raises PdmuxError."""
    if given is not None:
        if not given.exists():
            raise ConfigError(f"--profile {given} does not exist. Leave it out to measure one first.")
        return given
    path, config = out / "profile.json", out / "profile-config.yaml"
    out.mkdir(parents=True, exist_ok=True)
    document, _ = load_serve_config(served, [f"model={model}"])
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    print_line(console, f"no --profile: measuring one first, at most {PROFILE_S / 60:.0f} minutes")
    argv = [sys.executable, "-m", "pdmux_ray.cli", "profile", str(config), "--out", str(path), "--force"]
    if code := subprocess.run(argv, check=False).returncode:
        raise PdmuxError(f"`pdmux profile` ended with {code}: there is no profile to plan by. What it said stands above.")
    return path
