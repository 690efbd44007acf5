"""Instances without Ray, each in a process of its own: what `faults` kills, freezes and cuts off.

A `Nursery` is a process that has loaded the libraries and forks instances, so that a start takes a second and not ten. An
instance has an engine and an end of KV transfers over NIXL, put together as `serve.instance` does. It is told what to do by
lines of JSON on a socket, and says by others what happens; `Instance` is its handle.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import psutil

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner, limit_spinning
from pdmux_ray.device.cpu.cores import own_cores
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import PdmuxError
from pdmux_ray.serve.peers import Peers, Who, open_peers
from pdmux_ray.types import ModelFacts, NewRequest, SamplingParams, TokenEvent

START_S = 120.0  # to load the libraries, the model and NIXL
WATCH_S = 0.002  # between two looks at who is linked
_CREDENTIALS = struct.Struct("3i")  # of who has connected to a socket: process, user, group

News: TypeAlias = tuple[str, int | None, str | None, str | None]  # request id, token, finish, error
Inside: TypeAlias = Callable[[Sequence[str]], list[str]]  # a command line -> one that runs it somewhere


@dataclass(frozen=True, slots=True)
class Setup:
    """Of an instance. `place`: which of the machine's cores are its own (`own_cores`). `port` 0: any. `compatible`: what its
    peers must have in common with it."""

    name: str
    directory: str  # of the model; only its config.json is read when the weights are random
    engine: dict[str, Any]  # an EngineConfig
    place: int
    host: str
    port: int
    compatible: str


class Nursery:
    """`inside`: another network, on another kernel as far as its processes can see; KV goes by TCP then. Close it."""

    def __init__(self, folder: Path, name: str, inside: Inside | None = None) -> None:
        """Its files, a socket and a log, are in the folder."""
        path, self.log = folder / f"{name}.sock", folder / f"{name}.log"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(START_S)
        command = [sys.executable, "-m", "pdmux_ray.bench.fault_instance", str(path)]
        environment = dict(os.environ)
        if inside is not None:
            command = inside(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command])
            environment["UCX_TLS"] = "tcp,self"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True)

    def start(self, setup: Setup, heard: Callable[[Sequence[News]], None]) -> Instance:
        """Returns when the instance can be reached. Raises PdmuxError when it cannot."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(setup)), file=self._process.stdin, flush=True)
            sock, _ = self._server.accept()
        except OSError as error:
            raise PdmuxError(f"{setup.name} has not started ({error!r}); the end of its log:\n{_tail(self.log)}") from error
        return Instance(setup.name, sock, heard, self.log)

    def close(self) -> None:
        self._server.close()
        self._process.kill()
        self._process.wait()


class Instance:
    """Owner: one thread, but for `heard`, which is called in another one with what each step made of the requests."""

    def __init__(self, name: str, sock: socket.socket, heard: Callable[[Sequence[News]], None], log: Path) -> None:
        self.name = name
        self._log = log
        self._heard = heard
        self._process = psutil.Process(
            _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        )
        self._told, self._said = sock.makefile("w"), sock.makefile("r")
        sock.close()  # with the files above
        self._linked: list[tuple[float, dict[str, int]]] = []  # since when -> peers that are linked, and their epochs
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: it has ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = str(self._answer())

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def meet(self, peers: Mapping[str, str]) -> None:
        """See `Peers.meet`."""
        self._tell("meet", dict(peers))

    def request(
        self, request_id: str, prompt: list[int], params: dict[str, Any], peers: list[str], generated: list[int]
    ) -> None:
        """`generated`: what another instance has made of it already."""
        self._tell("request", request_id, prompt, params, peers, generated)

    def leave(self, request_ids: list[str]) -> None:
        """The clients of these have gone."""
        self._tell("leave", request_ids)

    def state(self) -> dict[str, Any]:
        """Pages, requests and transfers now. Raises PdmuxError when an invariant of the engine is broken, or it has ended."""
        self._tell("state")
        state: dict[str, Any] = self._answer()
        if state["trouble"]:
            raise PdmuxError(f"{self.name}: {state['trouble']}")
        return state

    def epoch_of(self, peer: str) -> int | None:
        """Of the start of a peer that it is linked to; None when it is not."""
        return self._linked[-1][1].get(peer) if self._linked else None

    def unlinked_after_s(self, peer: str, epoch: int, since_s: float) -> float:
        """How long after a moment (time.monotonic) it was not linked to that start of the peer; inf: it is still."""
        before = [peers for at_s, peers in self._linked if at_s < since_s]
        if before and before[-1].get(peer) != epoch:
            return 0.0
        return next((at_s - since_s for at_s, peers in self._linked if at_s >= since_s and peers.get(peer) != epoch), math.inf)

    def kill(self) -> float:
        """When (time.monotonic). Whatever it said before has been heard when this returns."""
        at_s = time.monotonic()
        self._process.kill()
        self._reader.join()
        return at_s

    def freeze(self) -> float:
        """When (time.monotonic)."""
        at_s = time.monotonic()
        self._process.suspend()
        return at_s

    def thaw(self) -> None:
        self._process.resume()

    def _tell(self, what: str, *values: Any) -> None:
        try:
            print(json.dumps([what, *values]), file=self._told, flush=True)
        except OSError:  # it is dead, which whoever waits for an answer learns
            return

    def _answer(self) -> Any:
        try:
            answer = self._answers.get(timeout=START_S)
        except queue.Empty:
            raise PdmuxError(f"{self.name} has not answered within {START_S:g} s") from None
        if answer is None:
            self._answers.put(None)
            raise PdmuxError(f"{self.name} has ended; the end of its log:\n{_tail(self._log)}")
        return answer

    def _read(self) -> None:
        for line in self._said:
            kind, value = json.loads(line)
            if kind == "news":
                self._heard([tuple(each) for each in value])
            elif kind == "linked":
                self._linked.append((value[0], value[1]))
            else:
                self._answers.put(value)
        self._answers.put(None)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def facts_of(directory: Path) -> ModelFacts:
    """By config.json alone."""
    config = json.loads((directory / "config.json").read_text())
    end = config["eos_token_id"]
    return ModelFacts(
        config["max_position_embeddings"], config["vocab_size"], frozenset(end if isinstance(end, list) else [end])
    )


class _Served:
    """What an instance does when told. Owner: its main thread."""

    def __init__(self, setup: Setup, out: IO[str]) -> None:
        self._out = out
        self._saying = threading.Lock()
        self._config = config = EngineConfig.model_validate(setup.engine)
        with own_cores(setup.place, config.threads):
            runner = build_runner(Path(setup.directory), config)
        facts = facts_of(Path(setup.directory))
        who = Who(setup.name, setup.host, setup.compatible, "of these instances", setup.port)
        self._peers: Peers = open_peers(who, runner, facts, config.transfer)
        self._engine = Engine(runner, resolve_limits(config, facts, runner), self._publish, port=self._peers.port)
        self._engine.start()
        threading.Thread(target=self._watch, daemon=True).start()
        self._say("address", self._peers.address)

    def meet(self, peers: dict[str, str]) -> None:
        self._peers.meet(peers)

    def request(
        self, request_id: str, prompt: list[int], params: dict[str, Any], peers: list[str], generated: list[int]
    ) -> None:
        due_s = time.monotonic() + self._config.transfer.fetch_s if peers else None
        new = NewRequest(
            request_id,
            tuple(prompt),
            SamplingParams(**params),
            prefill_peers=tuple(peers),
            fetch_deadline_s=due_s,
            generated=tuple(generated) or None,
        )
        try:
            self._engine.submit(new)
        except PdmuxError as error:
            self._say("news", [(request_id, None, None, str(error))])

    def leave(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)

    def state(self) -> None:
        engine, trouble = self._engine, self._engine.problem()
        try:
            engine.check_integrity()
        except PdmuxError as error:
            trouble = str(error)
        load = engine.load()
        self._say(
            "state",
            {
                "trouble": trouble,
                "held_pages": load.total_pages - load.free_pages,
                "leased_pages": load.leased_pages,
                "quarantined_pages": load.quarantined_pages,
                "requests": load.running + load.waiting,
                "at_rest": self._peers.port.idle,
                "fetches": dict(engine.counters.fetches),
            },
        )

    def _publish(self, _: str, events: list[TokenEvent]) -> None:
        """In the engine's thread."""
        self._say("news", [(e.request_id, e.token, e.finish and e.finish.value, e.error) for e in events])

    def _watch(self) -> None:
        """In a thread of its own: says who is linked, when that changes."""
        said: dict[str, int] | None = None
        while True:
            linked = self._peers.port.peers()
            if linked != said:
                said = linked
                self._say("linked", (time.monotonic(), linked))
            time.sleep(WATCH_S)

    def _say(self, kind: str, value: Any) -> None:
        with self._saying:
            print(json.dumps([kind, value]), file=self._out, flush=True)


def _serve(setup: Setup, path: str) -> None:
    """Until nobody is there to tell it anything."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        served = _Served(setup, sock.makefile("w"))
        for line in sock.makefile("r"):
            what, *values = json.loads(line)
            getattr(served, what)(*values)


def main() -> None:
    """The nursery's process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    limit_spinning()
    for library in ("transformers", "kv_transfer.nixl", "pdmux_ray.device.cpu.runner"):  # slow to load; no threads so far
        importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for instances
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                _serve(Setup(**json.loads(line)), sys.argv[1])
            except BaseException:
                logging.exception("the instance ends")
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
