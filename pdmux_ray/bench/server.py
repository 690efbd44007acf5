"""Starts a server from a command line, waits until it answers, and stops it with everything it started."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import aiohttp
import psutil

from pdmux_ray.errors import PdmuxError
from pdmux_ray.serve.launch import is_ready
from pdmux_ray.serve.modes import free_ports


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    return free_ports(1)[0]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    command: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """The command's process and every live one below it. (scripts/serve adopts its orphans, so they stay below.)"""
        try:
            return [self.command, *self.command.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def running(command: str, model: str, timeout_s: float = 300.0) -> Iterator[Server]:
    """Runs `command` ({model} and {port} are filled in) and yields the server when it is ready.

    Raises PdmuxError with the end of the server's output when it exits or stays silent for `timeout_s`.
    """
    port = free_port()
    argv = shlex.split(command.format(model=model, port=port))
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        started = Server(url, psutil.Process(process.pid))
        try:
            _wait_until_ready(process, url, timeout_s, log)
            yield started
        finally:
            _stop(process, started.processes())


async def model_name(url: str) -> str:
    """The id of the first model that the server lists."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float, log: IO[bytes]) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if is_ready(url):
            return
        time.sleep(0.5)
    log.seek(0)
    tail = log.read()[-2000:].decode(errors="replace")
    raise PdmuxError(f"{process.args!r} did not become ready in {timeout_s:.0f} s; the end of its output:\n{tail}")


def _stop(process: subprocess.Popen[bytes], family: list[psutil.Process], grace_s: float = 60.0) -> None:
    """SIGTERM to the command itself, so that it can clean up; SIGKILL to whatever is left after that."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    for left in family:
        with contextlib.suppress(psutil.Error):
            left.kill()
    process.wait()
