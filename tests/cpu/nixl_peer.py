"""An instance's transport in a process of its own, told what to do by lines of JSON: the other end of the tests of NIXL.

The pool lies in a file, so that a test sees its bytes also when this process is frozen or dead.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer.api import TransportEvent, Write
from kv_transfer.layout import KVLayout
from kv_transfer.line import Kind
from kv_transfer.nixl import Identity, NixlTransport
from kv_transfer.nixl_agent import Pool

SECRET, COMPATIBILITY = "of the fleet", "same-model"
PATIENCE_S = 20.0


def pool_in(path: Path, layout: KVLayout) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with path.open("a+b") as file:
        file.truncate(layout.total_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), layout.total_bytes), dtype=np.uint8)


def transport(name: str, layout: KVLayout, memory: np.ndarray[Any, Any], **options: Any) -> NixlTransport:
    """`options`: of NixlTransport, and `compatibility`, `secret` and `kernel` of its identity."""
    identity = Identity(
        name, options.pop("compatibility", COMPATIBILITY), options.pop("secret", SECRET), options.pop("kernel", "one kernel")
    )
    return NixlTransport(identity, layout, Pool.of(memory), **options)


def until(
    end: NixlTransport, done: Callable[[list[TransportEvent]], bool], seconds: float = PATIENCE_S
) -> list[TransportEvent]:
    """Everything that happened at this end until `done` of it."""
    events: list[TransportEvent] = []
    deadline = time.monotonic() + seconds
    while True:
        events.extend(end.poll())
        if done(events):
            return events
        left = deadline - time.monotonic()
        assert left > 0, f"only {events} within {seconds} s"
        end.wait(left)


def epoch_of(end: NixlTransport, peer: str) -> int:
    """Of the start of the peer that is up."""
    return end._peers[peer].epoch


def named(events: Sequence[TransportEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


class PeerProcess:
    """A child with a transport. `memory`: its pool."""

    def __init__(self, folder: Path, name: str, layout: KVLayout, *, tls: str, **options: Any) -> None:
        path = folder / f"{name}.pool"
        self.memory = pool_in(path, layout)
        job = {"name": name, "layout": asdict(layout), "path": str(path), "options": options}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": tls, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.address: str = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Also one that is frozen."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class _Served:
    """What a test may ask of the child."""

    def __init__(self, end: NixlTransport, memory: np.ndarray[Any, Any]) -> None:
        self.end, self.memory = end, memory
        self.events: list[TransportEvent] = []

    def connect(self, peer: str, address: str) -> None:
        self.end.connect(peer, address)

    def happened(self) -> list[str]:
        """The names of the events so far; forgets them."""
        events, self.events = self.events, []
        return named(events)

    def wait_for(self, kind: str, number: int) -> list[str]:
        """As `happened`, when there are so many of that kind."""
        self.events += until(self.end, lambda new: named(self.events + new).count(kind) >= number)
        return self.happened()

    def post(self, peer: str, local: list[int], remote: list[int], note: str) -> int:
        return self.end.post(
            peer, epoch_of(self.end, peer), Write(np.array(local, np.int32), np.array(remote, np.int32), note.encode())
        )

    def say_written(self, peer: str, count: int) -> None:
        """That so many writes are over."""
        self.end._lines.send(self.end._peers[peer].line, Kind.WRITTEN, count.to_bytes(8, "big"))

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def checksum(self, peer: str, indices: list[int]) -> int:
        return self.end.checksum(peer, np.array(indices, np.int32))


def main() -> None:
    job = json.loads(sys.argv[1])
    layout = KVLayout(**job["layout"])
    memory = pool_in(Path(job["path"]), layout)
    end = transport(job["name"], layout, memory, **job["options"])
    served = _Served(end, memory)
    print(json.dumps(end.address), flush=True)
    while True:
        served.events.extend(end.poll())
        end.wait(0.005)
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            what, *arguments = json.loads(line)
            print(json.dumps(getattr(served, what)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
