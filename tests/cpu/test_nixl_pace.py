"""What it costs to wait for what NIXL tells nobody of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl")

from nixl_peer import PeerProcess, epoch_of, named, pool_in, transport, until

from kv_transfer.api import Write
from kv_transfer.layout import KVLayout
from kv_transfer.nixl import NixlTransport

pytestmark = pytest.mark.cpu

LAYOUT = KVLayout(layers=8, pages=256, kv_heads=4, page_size=32, head_dim=64, dtype_bytes=2)  # 64 MiB: no socket takes it whole
WAIT_S = 0.5


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NixlTransport, PeerProcess]]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    child = PeerProcess(tmp_path, "d", LAYOUT, tls="tcp,self")
    end = transport("p", LAYOUT, pool_in(tmp_path / "p.pool", LAYOUT))
    end.connect("d", child.address)
    until(end, lambda events: "PeerUp" in named(events))
    yield end, child
    end.close()
    child.kill()


def part_of_a_core(end: NixlTransport) -> float:
    """That this thread takes while it waits."""
    began, deadline = time.thread_time(), time.monotonic() + WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        end.poll()
        end.wait(left)
    return (time.thread_time() - began) / WAIT_S


def test_a_connection_without_writes_takes_no_core(pair: tuple[NixlTransport, PeerProcess]) -> None:
    end, _ = pair
    assert part_of_a_core(end) < 0.02


def test_a_write_that_does_not_end_takes_a_small_part_of_a_core(pair: tuple[NixlTransport, PeerProcess]) -> None:
    end, child = pair
    epoch = epoch_of(end, "d")
    child.freeze()
    every = np.arange(LAYOUT.layers * 2 * LAYOUT.pages, dtype=np.int32)
    end.post("d", epoch, Write(every, every, b"stuck"))
    assert part_of_a_core(end) < 0.15
