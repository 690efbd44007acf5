"""An instance's end of KV transfers, when its application has a topology: its endpoint over NIXL, and whom it is linked to.

Knows nothing of ray. Whom to link to the gateways tell (`links`): they know who is there, in which role.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from kv_transfer.api import KvTransferError
from kv_transfer.endpoint import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.messages import compatibility
from pdmux_ray import __version__
from pdmux_ray.config import TransferConfig
from pdmux_ray.engine.handoffs import transfer_limits
from pdmux_ray.errors import ConfigError
from pdmux_ray.serve import wire
from pdmux_ray.types import ModelFacts

_SAMPLE_BYTES = 2**20  # of each end of a file of weights
_IDLE_POLL_S = 0.05


@runtime_checkable
class Pooled(Protocol):
    """A runner whose KV other instances can read and write."""

    layout: KVLayout
    dtype: object  # torch's, or its name
    kv_memory: object  # the pool's bytes, as a writable buffer of `layout.total_bytes`


class Peers:
    """Owner: the replica's event loop. The endpoint runs in a thread of its own; its port is the engine's."""

    def __init__(self, endpoint: Endpoint, address: str) -> None:
        self.port = endpoint
        self.address = address
        self._called: dict[str, str] = {}  # peer -> its address
        endpoint.start()

    def meet(self, named: Mapping[str, str]) -> None:
        """Calls the peers named that are new (peer -> address). Gives up those that are neither named nor linked any more:
        several gateways name peers, and one that has just begun does not know all of them."""
        linked = self.port.peers()
        for peer in [peer for peer in self._called if peer not in named and peer not in linked]:
            del self._called[peer]
            self.port.forget(peer)
        for peer, address in named.items():
            if self._called.get(peer) != address:
                self._called[peer] = address
                self.port.connect(peer, address)

    @property
    def called(self) -> set[str]:
        """Peers that are called again and again while they are not linked."""
        return set(self._called)

    def linked(self) -> list[str]:
        """Peers that KV can be had from now."""
        return list(self.port.peers())

    def figures(self) -> wire.Figures:
        """What the engine's counters do not tell: see `pdmux_ray.metrics.catalog`."""
        stats = self.port.stats.snapshot()
        return {"pdmux_kv_peers": len(self.port.peers())} | {metric: stats[name] for metric, name in _METRICS.items()}

    def close(self, timeout_s: float) -> None:
        """Lets transfers that are under way come to their end for so long, then ends all. Blocks. The engine runs still."""
        end_s = time.monotonic() + timeout_s
        while not self.port.idle and time.monotonic() < end_s:
            time.sleep(_IDLE_POLL_S)
        self.port.close()


_METRICS = {  # -> field of `kv_transfer.stats.Stats`
    "pdmux_kv_landed_bytes_total": "landed_bytes",
    "pdmux_kv_landing_seconds_total": "landing_s",
    "pdmux_kv_wasted_bytes_total": "wasted_bytes",
    "pdmux_kv_quarantines_total": "quarantined",
    "pdmux_kv_quarantine_seconds_total": "quarantine_s",
    "pdmux_kv_unsent_total": "unsent",
    "pdmux_kv_written_bytes_total": "written_bytes",
    "pdmux_kv_written_seconds_total": "written_s",
    "pdmux_kv_writes_total": "writes",
    "pdmux_kv_failed_writes_total": "writes_failed",
    "pdmux_kv_fenced_total": "fenced",
    "pdmux_kv_refused_peers_total": "peers_refused",
    "pdmux_kv_silent_peers_total": "peers_silent",
}


@dataclass(frozen=True, slots=True)
class Who:
    """An instance, as its peers know it. `model`: what it computes KV of; see `model_digest`."""

    name: str
    host: str  # where peers reach it
    model: str
    secret: str = field(repr=False)
    port: int = 0  # likewise; 0: any


def open_peers(who: Who, runner: object, facts: ModelFacts, config: TransferConfig) -> Peers:
    """Raises ConfigError for a model whose KV is not that of its tokens alone, and when NIXL, or a pool that it can register,
    is not here."""
    if not facts.prefixes_are_shareable:
        raise ConfigError(
            "topology: this model's KV depends on the length of the prompt (dynamic RoPE scaling), so another instance cannot "
            "compute it ahead. Leave topology out."
        )
    if not isinstance(runner, Pooled):
        raise ConfigError("topology: this device cannot share its KV with other instances. Leave topology out, or take a CPU.")
    try:
        from kv_transfer.nixl import Identity, NixlTransport
        from kv_transfer.nixl_agent import Pool

        layout = runner.layout
        dtype = str(runner.dtype).removeprefix("torch.")
        identity = Identity(who.name, compatibility(who.model, dtype, layout, __version__), who.secret)
        limits = transfer_limits(config)
        pool = Pool.of(np.frombuffer(runner.kv_memory, dtype=np.uint8))  # type: ignore[call-overload]  # a buffer
        transport = NixlTransport(identity, layout, pool, host=who.host, port=who.port, limits=limits)
    except KvTransferError as error:
        raise ConfigError(f"a topology moves KV between instances over NIXL, which cannot work here: {error}") from error
    checksum = pool.device is None if config.checksum is None else config.checksum
    return Peers(Endpoint(transport, limits, checksum=checksum), transport.address)


def model_digest(directory: Path, load: str) -> str:
    """Names what KV is of: the model's config, and of each file of weights its size and both ends. Random weights differ by
    nothing else than the config."""
    digest = hashlib.blake2b(load.encode(), digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")) if load == "weights" else []:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
