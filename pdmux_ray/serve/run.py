"""What `launch` supervises: a private Ray in this process's care, and `serve run` on a config file.

    python -m pdmux_ray.serve.run DIRECTORY        with DIRECTORY/config.yaml; writes DIRECTORY/failure

`serve run` goes on for ever with an application that cannot start. Here the first failed start of a replica ends the server,
with its reason in the file `failure`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.scripts import cli as serve_command

from pdmux_ray.serve import descendants

OBJECT_STORE_BYTES = 256 * 2**20  # tokens do not go through it
_POLL_S = 0.5


def main() -> None:
    directory = Path(sys.argv[1])
    descendants.adopt_orphans()
    descendants.end_with_parent()  # the supervisor may be killed
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory / "ray"),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace="serve",
        )
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has set its own, which leaves Serve running
        threading.Thread(target=_watch, args=(directory / "failure",), daemon=True).start()
        serve_command(["run", str(directory / "config.yaml")])
    except KeyboardInterrupt:
        pass  # before `serve run` had begun: it shuts Serve down by itself
    finally:
        ray.shutdown()
        descendants.kill_all()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _watch(failure: Path) -> None:
    """Ends this process when the application cannot start. Stops watching when it runs: from then on Serve repairs it."""
    while True:
        time.sleep(_POLL_S)
        applications = serve.status().applications.values()
        if applications and all(a.status == "RUNNING" for a in applications):
            return
        reasons = [reason for a in applications for reason in _failed_starts(a)]
        if reasons:
            failure.write_text("\n".join(reasons), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _failed_starts(application: Any) -> list[str]:
    """Of a serve.status() application: why it, or a replica of it, could not start."""
    if application.status == "DEPLOY_FAILED" and not application.deployments:
        return [_last_error(application.message)]
    deployments = application.deployments.items()
    return [f"{name}: {_last_error(d.message)}" for name, d in deployments if "failed to start" in d.message]


def _last_error(text: str) -> str:
    """The exception that a traceback ends with, with its whole message."""
    beginnings = list(re.finditer(r"^(?:\w+\.)*(\w*(?:Error|Exception)\w*): ", text, re.MULTILINE))
    return text[beginnings[-1].start(1) :].strip() if beginnings else text.strip()


if __name__ == "__main__":
    main()
