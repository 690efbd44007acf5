"""Two network namespaces joined by a link of their own: two nodes on one machine, whose link can be cut, healed and shaped.

    with Namespaces() as nodes:
        process = subprocess.Popen(nodes.inside(0, ["python", "-m", "..."]))  # reaches the other one at nodes.address(1)
        nodes.cut()

Linux, root, and `ip` and `tc` (iproute2). Nothing outside the two namespaces is changed, and only that link reaches them:
also loopback is theirs alone. Files, shared memory and process ids are those of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, Self

from pdmux_ray.errors import PdmuxError

Side = Literal[0, 1]
SIDES: tuple[Side, Side] = (0, 1)
_NOBODY = "02:00:00:00:00:00"  # an Ethernet address that neither end has
_BURST_BYTES = 256 * 1024  # sent at once: more than a packet of a link that segments late, 64 KiB
_QUEUE_MS = 50  # of packets that wait for the rate, before they are dropped
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def why_not() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"no command {' or '.join(missing)} (iproute2)"
    name = _name(next(_numbers))
    try:
        _run("ip", "netns", "add", name)
    except PdmuxError as error:
        return str(error)
    _run("ip", "netns", "del", name)
    return None


class Namespaces:
    """Owner: whoever enters it. On leaving, what still runs inside loses its network; processes are not ended."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = (f"{_name(number)}-0", f"{_name(number)}-1")
        self.devices = (f"pd{os.getpid()}a{number % 100}", f"pd{os.getpid()}b{number % 100}")  # at most 15 characters
        self._network = f"10.200.{number % 256}"

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            far = ("peer", "name", self.devices[1], "netns", self.names[1])
            self._ip(0, "link", "add", self.devices[0], "type", "veth", *far)
            for side in SIDES:
                self._ip(side, "address", "add", f"{self.address(side)}/30", "dev", self.devices[side])
                self._ip(side, "link", "set", "lo", "up")
                self._ip(side, "link", "set", self.devices[side], "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def address(self, side: Side) -> str:
        """IPv4, as both ends see it."""
        return f"{self._network}.{side + 1}"

    def inside(self, side: Side, command: Sequence[str]) -> list[str]:
        """The command line that runs it there. It becomes that process, so its id and signals are the command's own."""
        return ["ip", "netns", "exec", self.names[side], *command]

    @contextlib.contextmanager
    def entered(self, side: Side) -> Iterator[None]:
        """Within, what the calling thread connects or listens at is there, and so is what threads do that it starts."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.names[side]}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def counted(self, side: Side) -> tuple[int, int]:
        """Bytes that this end of the link has received, and sent."""
        shown = _run("ip", "-n", self.names[side], "-json", "-statistics", "link", "show", self.devices[side])
        found = json.loads(shown)[0]["stats64"]
        return found["rx"]["bytes"], found["tx"]["bytes"]

    def cut(self, *, silently: bool = True) -> None:
        """Whatever is sent is lost, both ways. `silently`: as when something between the nodes fails: both see their link up,
        and connecting takes its time to fail. Otherwise the link is down at both ends, and nothing can be sent."""
        for side in SIDES:
            if silently:
                far = (self.address(1 if side == 0 else 0), "lladdr", _NOBODY, "nud", "permanent")
                self._ip(side, "neighbour", "replace", *far, "dev", self.devices[side])
            else:
                self._ip(side, "link", "set", self.devices[side], "down")

    def heal(self) -> None:
        """Undoes `cut`. Connections that nobody has given up go on."""
        for side in SIDES:
            far = self.address(1 if side == 0 else 0)
            with contextlib.suppress(PdmuxError):  # there is none after a cut that is seen
                self._ip(side, "neighbour", "del", far, "dev", self.devices[side])
            self._ip(side, "link", "set", self.devices[side], "up")

    def shape(self, rate_mbit_s: float, delay_ms: float = 0.0) -> None:
        """Of each direction. Raises PdmuxError for a delay where the kernel has none (sch_netem)."""
        for side in SIDES:
            rate = f"{rate_mbit_s}mbit"
            shaper = ["netem", "rate", rate, "delay", f"{delay_ms}ms"]
            if not delay_ms:
                shaper = ["tbf", "rate", rate, "burst", f"{_BURST_BYTES}b", "latency", f"{_QUEUE_MS}ms"]
            _run("tc", "-n", self.names[side], "qdisc", "replace", "dev", self.devices[side], "root", *shaper)

    def _ip(self, side: Side, *arguments: str) -> None:
        _run("ip", "-n", self.names[side], *arguments)

    def _remove(self) -> None:
        """The link lives in the namespaces, and a namespace goes with its name and its last process."""
        with contextlib.suppress(PdmuxError):
            self._ip(0, "link", "del", self.devices[0])
        for name in self.names:
            with contextlib.suppress(PdmuxError):
                _run("ip", "netns", "del", name)


def _name(number: int) -> str:
    return f"pdmux-{os.getpid()}-{number}"


def _enter(namespace: int) -> None:
    """`os.setns`, which Python 3.11 has not got."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _run(*command: str) -> str:
    """What it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PdmuxError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
