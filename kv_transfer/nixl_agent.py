"""One NIXL agent: the memory of this pool and of one peer's, and the writes between them. The only module that imports nixl.

What it depends on was measured with nixl-cu12 1.5.1 over UCX, two processes, host memory:

- An agent serves one connection to one start of one peer and ends with it, because nothing less ends a write. Releasing the
  handle of a write that is posted succeeds at once and all bytes land nevertheless, without the note; the same after
  `invalidateRemoteMD`. With the agent gone, no more is read here than was on its way (TCP), and what a peer still writes to it
  fails there: of 8,192 pages none landed, against all of them without that. It also makes stale names impossible: metadata of a
  peer that has restarted under its old name is refused (NOT_ALLOWED) by an agent that knew it before.
  The first agent of a process takes 0.45 s, every other 20 to 30 ms; one more registration of the same host memory 1 ms.
- Between processes of one kernel UCX writes by system call straight into the other's memory (CMA), also into one that is
  frozen: only the writer's death or its word ends that. Such a write is done when `post` returns.
- An agent's destructor joins its progress thread with the interpreter's lock held, and that thread spins while a connection to
  a peer is being made: if the peer is frozen then, the whole process stands still until it wakes up or dies.
- A frozen peer (SIGSTOP) is never reported: its writes stay in progress for ever. A killed one is, after 10 to 50 ms.
- The progress thread polls without rest, a whole core for each agent, unless pthrDelay (microseconds) is more than 0: then it
  sleeps until UCX has something, and the delay is only its longest sleep. The class `nixl_agent` fixes it at 0, hence the
  bindings. Without that thread bytes would arrive by TCP only while their receiver polls.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import logging
import os
import secrets
import socket
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_transfer.api import Indices, TransportError
from kv_transfer.plan import Rows, joined

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it says more to stdout, which may be somebody's output

try:
    from nixl import _bindings as nixl
except ImportError as error:
    raise TransportError(f"NIXL cannot be loaded ({error}): install the extra pdmux-ray[nixl]") from error

_LONGEST_SLEEP_US = 100_000
_SIOCGIFADDR = 0x8915

log = logging.getLogger("kv_transfer")
_NIXL_ERRORS = tuple(found for name, found in vars(nixl).items() if name.startswith("nixl") and name.endswith("Error"))


@dataclass(frozen=True, slots=True)
class Pool:
    """Where a KV pool lies. `owner` is kept alive as long as the memory is registered."""

    address: int
    size_bytes: int
    owner: object
    device: int | None = None  # of CUDA; None: host memory

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> Pool:
        """Of an array in host memory, contiguous and writable."""
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError("a pool is one contiguous, writable array")
        return cls(array.ctypes.data, array.nbytes, array)

    def checksum(self, rows: Rows) -> int:
        """CRC-32 over these bytes of it, one row after the other."""
        if self.device is not None:
            raise TransportError("checksums are of KV in host memory only: switch them off on a GPU")
        memory = memoryview((ctypes.c_char * self.size_bytes).from_address(self.address))
        crc = 0
        for offset, size in joined(rows).tolist():  # each call may have to wait for Python's lock: as few as can be
            crc = zlib.crc32(memory[offset : offset + size], crc)
        return crc

    @property
    def segment(self) -> object:
        return nixl.DRAM_SEG if self.device is None else nixl.VRAM_SEG


class Agent:
    """See the module. Owner: one thread. Its calls raise TransportError when NIXL cannot do what they ask."""

    def __init__(self, pool: Pool) -> None:
        """Registers the pool; a peer may write into it from the moment it has `metadata`."""
        self._pool = pool
        self._lists: list[int] = []
        self._writes: set[int] = set()
        self._peer = b""
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _LONGEST_SLEEP_US
        try:
            self._agent = nixl.nixlAgent(f"kv-{secrets.token_hex(16)}", config)
            self._agent.createBackend("UCX", {})
            region = (pool.address, pool.size_bytes, pool.device or 0, "")
            self._region = nixl.nixlRegDList(pool.segment, [region])
            self._agent.registerMem(self._region, [])
            self.metadata: bytes = self._agent.getLocalMD()
        except _NIXL_ERRORS as error:
            raise TransportError(
                f"NIXL cannot register {pool.size_bytes} bytes with UCX ({error}); UCX_TLS, if set, must have tcp or RDMA in it"
            ) from error

    def reach(self, metadata: bytes, peer: Pool, local: Rows, remote: Rows) -> None:
        """The peer's agent, and the descriptors of both pools that `post` counts in: [n, 2], offset and bytes."""
        try:
            self._peer = self._agent.loadRemoteMD(metadata)
            self._lists.append(self._prepare(nixl.NIXL_INIT_AGENT, self._pool, local))
            self._lists.append(self._prepare(self._peer.decode(), peer, remote))
        except (*_NIXL_ERRORS, ValueError) as error:
            raise TransportError(f"NIXL cannot reach the peer's memory: {error}") from error

    def post(self, local: Indices, remote: Indices, note: bytes) -> int | None:
        """Starts a write; its number for `is_done`. None: it is done already."""
        ours, theirs = self._lists
        try:
            write: int = self._agent.makeXferReq(nixl.NIXL_WRITE, ours, local, theirs, remote, note, [], False)
            self._writes.add(write)
            return None if self._is_over(write, self._agent.postXferReq(write)) else write
        except _NIXL_ERRORS as error:
            raise TransportError(f"NIXL cannot write: {error}") from error

    def note(self, note: bytes) -> None:
        """To the peer, without a write."""
        try:
            self._agent.genNotif(self._peer.decode(), note)
        except _NIXL_ERRORS as error:
            raise TransportError(f"NIXL cannot notify the peer: {error}") from error

    def is_done(self, write: int) -> bool:
        """Whether all of it is at the peer, and its note. Not to be asked again then."""
        try:
            return self._is_over(write, self._agent.getXferStatus(write))
        except _NIXL_ERRORS as error:
            raise TransportError(f"a write of NIXL failed: {error}") from error

    def notes(self) -> list[bytes]:
        """Of the peer's writes that have landed since the last call."""
        try:
            found: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        except _NIXL_ERRORS as error:
            raise TransportError(f"NIXL cannot say what has landed: {error}") from error
        return [note for notes in found.values() for note in notes]

    def close(self) -> bool:
        """Writes of both ends stop where they are: see the module. False: the peer's may go on, NIXL keeps the memory open."""
        for write in self._writes:
            self._quietly("releaseXferReq", write)
        for prepared in self._lists:
            self._quietly("releasedDlistH", prepared)
        if self._peer:
            self._quietly("invalidateRemoteMD", self._peer.decode())
        closed = self._quietly("deregisterMem", self._region, [])
        del self._agent  # the last reference: its destructor closes UCX's connections
        return closed

    def _quietly(self, method: str, *what: object) -> bool:
        """Whether it went well. What NIXL has lost already needs no release; its destructor takes the rest."""
        try:
            getattr(self._agent, method)(*what)
        except _NIXL_ERRORS as error:
            log.info("NIXL does not %s: %s", method, error)
            return False
        return True

    def _prepare(self, agent: str, pool: Pool, rows: Rows) -> int:
        table = np.empty((len(rows), 3), dtype=np.uint64)
        table[:, 0] = rows[:, 0] + np.uint64(pool.address)
        table[:, 1] = rows[:, 1]
        table[:, 2] = pool.device or 0
        prepared: int = self._agent.prepXferDlist(agent, nixl.nixlXferDList(pool.segment, table), [])
        return prepared

    def _is_over(self, write: int, status: object) -> bool:
        if status == nixl.NIXL_IN_PROG:
            return False
        if status != nixl.NIXL_SUCCESS:
            raise TransportError(f"a write of NIXL ended with {status}")
        self._writes.discard(write)
        self._agent.releaseXferReq(write)
        return True


def restrict_ucx_to(host: str) -> None:
    """Agents made from now on listen where peers reach `host` (an IP address) and on RDMA devices, not on every interface.

    UCX_NET_DEVICES, where it is set, stays as it is.
    """
    address = ipaddress.ip_address(host)
    if address.is_unspecified or "UCX_NET_DEVICES" in os.environ:
        return
    interfaces = ["lo"] if address.is_loopback else [name for _, name in socket.if_nameindex() if host in _addresses(name)]
    if not interfaces:
        log.warning("no interface has the address %s: UCX listens on all", host)
        return
    ports = [] if address.is_loopback else sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    rdma = [f"{port.parents[1].name}:{port.name}" for port in ports]
    os.environ["UCX_NET_DEVICES"] = ",".join([*interfaces, *rdma])


def _addresses(interface: str) -> set[str]:
    """IP addresses of it: the first of version 4, all of version 6."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:
            log.debug("%s has no address of version 4", interface)
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        if name == interface:
            found.add(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found
