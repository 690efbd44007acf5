"""Starts a server from a command line, waits until it answers, and stops it with everything it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import IO

from pdmux_ray.errors import PdmuxError


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(command: str, model: str, timeout_s: float = 300.0) -> Iterator[str]:
    """Runs `command` ({model} and {port} are filled in) in its own process group and yields its URL when /v1/models answers.

    Raises PdmuxError with the end of the server's output when it exits or stays silent for `timeout_s`.
    """
    port = free_port()
    argv = shlex.split(command.format(model=model, port=port))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}", timeout_s, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float, log: IO[bytes]) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return
        time.sleep(0.5)
    log.seek(0)
    tail = log.read()[-2000:].decode(errors="replace")
    raise PdmuxError(f"{process.args!r} did not become ready in {timeout_s:.0f} s; the end of its output:\n{tail}")


def _stop(process: subprocess.Popen[bytes], grace_s: float = 60.0) -> None:
    """SIGTERM to the server itself, so that it can clean up; SIGKILL to its whole group if it does not."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
