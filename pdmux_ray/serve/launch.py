"""`scripts/serve`: a server from one config file, with a Ray of its own on loopback; nothing of it is left when it ends.

    this process ── supervises ──► pdmux_ray.serve.run ── starts ──► Ray, Serve, HAProxy, replicas

The supervisor never imports Ray, and torch only when it makes the demo model. It adopts whatever its child leaves behind, so it
can end every process that came of it and did not end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdmux_ray import __version__
from pdmux_ray.config import AppConfig, load_serve_config, require_profile
from pdmux_ray.device.gpus import require_gpu
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.model.source import resolve
from pdmux_ray.serve import descendants, modes

START_TIMEOUT_S = 600.0
# Times to stop, longest first. An answer may take gateway.request_timeout_s, and HAProxy keeps its connection as long when it
# reloads. A replica that Serve stops while the server runs on gets its deployment's graceful_shutdown_timeout_s (app.py), of
# which an instance gives most to open answers. When the whole server is to stop, nobody waits for answers:
STOP_GRACE_S = 10.0  # for Serve to end its replicas; what is left then is killed
KILL_S = 5.0  # which takes less than this
MAX_FOLDER_CHARS = 20  # of the temporary folder: Ray and HAProxy put long names of sockets into it

_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Named for other systems, but it is what makes Ray's own ports listen on loopback alone, also here.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be started. `directory` is this run's own: Ray's session, the config as it runs, the log."""

    config: AppConfig
    document: dict[str, Any]  # the Serve config file, with the port that was asked for
    front: modes.HttpFront
    directory: Path

    @property
    def url(self) -> str:
        http = self.document["http_options"]
        host = "127.0.0.1" if http["host"] == "0.0.0.0" else http["host"]
        return f"http://{host}:{http['port']}"

    @property
    def log(self) -> Path:
        return self.directory / "serve.log"


def main(argv: Sequence[str] | None = None) -> int:
    """0 after Ctrl-C or SIGTERM, 1 when the server failed, 2 for a wrong argument or config."""
    args = parser().parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    descendants.adopt_orphans()
    folder = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="pdmux-", dir=folder if len(folder) <= MAX_FOLDER_CHARS else "/tmp"))
    code = 1
    try:
        code = _serve(make_plan(args, directory))
    except KeyboardInterrupt:
        code = 0
    except ConfigError as error:
        print(f"scripts/serve: {error}", file=sys.stderr)
        code = 2
    except PdmuxError as error:
        print(f"scripts/serve: {error}", file=sys.stderr)
    finally:
        if code != 1:  # a failure's log stays
            shutil.rmtree(directory, ignore_errors=True)
    return code


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/serve", description="Serves a model over OpenAI's HTTP API.")
    default = Path(__file__).parents[2] / "configs" / "cpu-demo.yaml"
    parser.add_argument(
        "config", nargs="?", type=Path, default=default, help="Serve config file (default: configs/cpu-demo.yaml)"
    )
    parser.add_argument("--port", type=int, help="HTTP port, instead of the config's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the application's args, such as model=DIRECTORY"
    )
    parser.add_argument("--proxy", action="store_true", help="Serve's own Python proxy in front, instead of HAProxy (slower)")
    return parser


def _interrupt(number: int, frame: object) -> None:
    """The first signal ends the run; while it ends, further ones change nothing."""
    for n in (signal.SIGINT, signal.SIGTERM):
        signal.signal(n, signal.SIG_IGN)
    print(f"stopping (up to {STOP_GRACE_S + KILL_S:.0f} s)", flush=True)
    raise KeyboardInterrupt


def make_plan(args: argparse.Namespace, directory: Path) -> Plan:
    """`args` of `parser()`. Raises ConfigError: a wrong config, TLS, or no GPU, such address or API key."""
    document, config = load_serve_config(args.config, args.set)
    require_gpu(config.engine)
    http = document["http_options"] = document.get("http_options") or {}
    http["host"] = http.get("host") or "127.0.0.1"  # behind HAProxy, Serve's own default would be every interface
    http["port"] = args.port if args.port is not None else 8000 if http.get("port") is None else http["port"]
    _require_no_tls(http)
    _require_address(http["host"], http["port"])
    _require_api_keys(config.gateway.api_keys_env)
    require_profile(config)
    return Plan(config, document, "proxy" if args.proxy else "haproxy", directory)


def _require_no_tls(http: dict[str, Any]) -> None:
    """Serve's HAProxy passes over these keys in silence, and keys would then travel in the open."""
    if asked := sorted(key for key in http if key.startswith("ssl_") and http[key]):
        raise ConfigError(
            f"http_options has {', '.join(asked)}, but this server speaks plain HTTP. Leave them out, and put a proxy with TLS "
            "in front of it (docs/operations.md, Secure)."
        )


def _require_address(host: Any, port: Any) -> None:
    if type(port) is not int or not 0 < port < 2**16:
        raise ConfigError(f"the HTTP port must be a number from 1 to 65535, got {port!r}")
    try:
        family = socket.getaddrinfo(str(host), port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((str(host), port), family=family).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"port {port} of {host} cannot be had ({error}): choose another with --port") from None


def _require_api_keys(variable: str | None) -> None:
    """The gateways would find out, too, but only when Ray and Serve are up."""
    if variable is not None and not os.environ.get(variable, "").replace(",", " ").strip():
        raise ConfigError(
            f"gateway.api_keys_env names {variable}, but that variable holds no key. Set it (comma-separated keys) in the "
            "environment of scripts/serve"
        )


def _serve(plan: Plan) -> int:
    started_s = time.monotonic()
    resolve(plan.config.model, weights=plan.config.engine.reads_weights)
    (plan.directory / "config.yaml").write_text(yaml.safe_dump(plan.document, sort_keys=False), encoding="utf-8")
    with _running(plan) as child:
        _wait_until_ready(plan, child, started_s)
        _announce(plan, time.monotonic() - started_s)
        code = child.wait()
    raise PdmuxError(f"the server ended by itself (exit code {code}). {_reason(plan)}")


@contextlib.contextmanager
def _running(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    environment |= {
        **_RAY,
        **modes.environment(plan.front, plan.config.gateway),
        **_haproxy_files(plan.directory),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "pdmux_ray.serve.run", str(plan.directory)]
    child = None
    try:
        with plan.log.open("wb") as log:
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        yield child
    finally:
        _stop(child)


def _haproxy_files(directory: Path) -> dict[str, str]:
    """Into this run's own folder, which no other user may enter: HAProxy's admin socket asks nobody for a password.

    Short names, since a socket's path has 107 characters at most and Serve puts a node id of 56 into it.
    """
    files = {"CONFIG_FILE_LOC": "h/cfg", "SOCKET_PATH": "h/s", "METRICS_SOCKET_PATH": "h/m", "SERVER_STATE_FILE": "h/state"}
    return {f"RAY_SERVE_HAPROXY_{k}": str(directory / v) for k, v in (files | {"SERVER_STATE_BASE": "h"}).items()}


def _stop(child: subprocess.Popen[bytes] | None) -> None:
    """Asks the child to shut Serve down, then makes sure that nothing of this run is left."""
    if child is not None and child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_GRACE_S)
    descendants.kill_all()


def _wait_until_ready(plan: Plan, child: subprocess.Popen[bytes], started_s: float) -> None:
    """Until requests are served, and no instance is missing. Raises PdmuxError with the reason when that will never be."""
    shown_s = 0
    while not is_ready(plan.url):
        elapsed_s = int(time.monotonic() - started_s)
        if child.poll() is not None:
            raise PdmuxError(f"the server did not start. {_reason(plan)}")
        if elapsed_s > START_TIMEOUT_S:
            raise PdmuxError(f"the server did not start within {START_TIMEOUT_S:.0f} s. {_reason(plan)}")
        if elapsed_s >= shown_s + 5:
            shown_s = elapsed_s
            print(f"starting: {elapsed_s} s", flush=True)
        time.sleep(0.1)


def is_ready(url: str) -> bool:
    """Whether /health is 200; if it tells of troubles, as ours does, that no instance is missing."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            body = response.read()
    except (OSError, urllib.error.URLError):
        return False
    try:
        return "missing" not in json.loads(body)["troubles"]
    except (ValueError, KeyError, TypeError):
        return True


def _reason(plan: Plan) -> str:
    """What `pdmux_ray.serve.run` wrote down, or else the end of its output."""
    failure = plan.directory / "failure"
    if failure.exists():
        return f"{failure.read_text(encoding='utf-8').strip()}\nThe log is {plan.log}"
    tail = plan.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "The end of its output:\n" + "\n".join(f"  {line}" for line in tail) + f"\nThe log is {plan.log}"


def _announce(plan: Plan, seconds: float) -> None:
    model = plan.config.model_name
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": messages, "temperature": 0}
    key = "" if plan.config.gateway.api_keys_env is None else " -H 'Authorization: Bearer YOUR_KEY'"
    how = "HAProxy in front" if plan.front == "haproxy" else "Serve's own proxy in front"
    print(f"pdmux-ray {__version__} serves {model!r} at {plan.url}/v1 after {seconds:.1f} s ({how}). Ctrl-C ends it.")
    print(f"log: {plan.log}\n")
    print(f"curl {plan.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
