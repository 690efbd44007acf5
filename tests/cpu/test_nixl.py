"""NIXL as the transport of real processes: what arrives, and what happens to writes when a peer dies, freezes or returns."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl")

from nixl_peer import PeerProcess, named, pool_in, transport, until

from kv_transfer.api import Limits, Notified, PeerFenced, PeerUp, TransportError, Write, WriteDone
from kv_transfer.layout import KVLayout
from kv_transfer.nixl import NixlTransport
from kv_transfer.nixl_agent import Agent
from kv_transfer.plan import grid, indices

pytestmark = pytest.mark.cpu

TCP, SHARED_MEMORY = "tcp,self", "tcp,sm,self"
SMALL = KVLayout(layers=3, pages=16, kv_heads=2, page_size=16, head_dim=8, dtype_bytes=2)
LARGE = KVLayout(layers=8, pages=256, kv_heads=4, page_size=32, head_dim=64, dtype_bytes=2)  # 64 MiB: no socket takes it whole
NOTICE_S = 0.25  # from a kill to the last event of it

Children = Callable[..., PeerProcess]
Ends = Callable[..., NixlTransport]


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """UCX opens some files once for the whole process."""
    transport("first", SMALL, pool_in(tmp_path_factory.mktemp("first") / "pool", SMALL)).close()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = _held()
    yield
    gc.collect()
    assert _held() == before


def _held() -> tuple[int, int]:
    """Open sockets, pipes and such, of which an agent has some, and threads, of which it has one."""
    opened = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            opened += not os.readlink(file).startswith("/")
    return opened, len(os.listdir("/proc/self/task"))


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started: list[PeerProcess] = []

    def start(name: str, layout: KVLayout, **options: object) -> PeerProcess:
        started.append(PeerProcess(tmp_path, name, layout, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made: list[NixlTransport] = []

    def make(name: str, layout: KVLayout, tls: str = TCP, value: int = 0, **options: object) -> NixlTransport:
        monkeypatch.setenv("UCX_TLS", tls)
        memory = pool_in(tmp_path / f"{name}.pool", layout)
        memory[:] = value
        made.append(transport(name, layout, memory, **options))
        return made[-1]

    yield make
    for end in made:
        end.close()


def joined(end: NixlTransport, peer: str, address: str) -> int:
    """The epoch of the peer that is up now."""
    end.connect(peer, address)
    (event,) = [event for event in until(end, lambda events: "PeerUp" in named(events)) if isinstance(event, PeerUp)]
    return event.epoch


def everything(layout: KVLayout, note: bytes = b"all") -> Write:
    every = np.arange(layout.layers * 2 * layout.pages, dtype=np.int32)
    return Write(every, every, note)


def pages_of(child: PeerProcess, layout: KVLayout, value: int) -> int:
    """How many pages of the child's pool have this value throughout."""
    return int((child.memory.reshape(-1, layout.page_bytes) == value).all(axis=1).sum())


@pytest.mark.parametrize("tls", [TCP, SHARED_MEMORY])
@pytest.mark.parametrize("page_size", [16, 4])
def test_planned_bytes_arrive_exactly_and_then_the_note(
    children: Children, ends: Ends, tmp_path: Path, tls: str, page_size: int
) -> None:
    theirs = KVLayout(3, 16 * 16 // page_size, 2, page_size, 8, 2)
    child, end = children("d", theirs, tls=tls), ends("p", SMALL, tls)
    source = pool_in(tmp_path / "p.pool", SMALL)
    source[:] = np.random.default_rng(0).integers(1, 256, SMALL.total_bytes)
    epoch = joined(end, "d", child.address)
    cut, layers, tokens = grid(SMALL, theirs), range(1, 3), range(16, 40)
    mine = indices(SMALL, cut, [9, 2, 5], layers, tokens)
    need = 48 // page_size
    pages = [int(page) for page in np.random.default_rng(1).permutation(theirs.pages)[:need]]
    remote = indices(theirs, cut, pages, layers, tokens)

    handle = end.post("d", epoch, Write(mine, remote, b"landed"))

    assert WriteDone(handle, ok=True) in until(end, lambda events: "WriteDone" in named(events))
    assert child.ask("wait_for", "Notified", 1) == ["PeerUp", "Notified"]
    expected = np.zeros(theirs.shape, np.uint16)
    pool = source.view(np.uint16).reshape(SMALL.shape)
    for token in range(16, -(-40 // cut.group_slots) * cut.group_slots):
        page, slot = pages[token // page_size], token % page_size
        expected[1:3, :, page, :, slot] = pool[1:3, :, [9, 2, 5][token // 16], :, token % 16]
    assert (child.memory.view(np.uint16).reshape(theirs.shape) == expected).all()
    assert child.ask("checksum", "p", remote.tolist()) == end.checksum("d", mine) != 0


@pytest.mark.parametrize("tls", [TCP, SHARED_MEMORY])
@pytest.mark.parametrize(("first", "heads", "page_size"), [(2, 2, 16), (1, 1, 16), (3, 4, 16), (2, 2, 8)])
def test_many_writes_at_once_between_unequal_parts_of_the_heads_bring_those_that_both_have(
    children: Children, ends: Ends, tmp_path: Path, tls: str, first: int, heads: int, page_size: int
) -> None:
    """Row 43: a page a write, each into another page."""
    mine, theirs = KVLayout(3, 128, 4, 16, 8, 2), KVLayout(3, 128 * 16 // page_size, heads, page_size, 8, 2, first)
    child, end = children("d", theirs, tls=tls), ends("p", mine, tls)
    source = pool_in(tmp_path / "p.pool", mine)
    source[:] = np.random.default_rng(0).integers(1, 256, mine.total_bytes)
    epoch = joined(end, "d", child.address)
    cut, layers, tokens, split = grid(mine, theirs), range(3), range(16), 16 // page_size
    targets = np.random.default_rng(1).permutation(128)
    for page, target in enumerate(targets):
        into = [int(target) * split + part for part in range(split)]
        write = Write(indices(mine, cut, [page], layers, tokens), indices(theirs, cut, into, layers, tokens), b"%d" % page)
        end.post("d", epoch, write)

    events = until(end, lambda events: named(events).count("WriteDone") == 128)
    assert all(event.ok for event in events if isinstance(event, WriteDone))
    child.ask("wait_for", "Notified", 128)
    pool = source.view(np.uint16).reshape(mine.shape)
    landed = child.memory.view(np.uint16).reshape(theirs.shape)
    both = range(max(first, 0), min(first + heads, 4))
    expected = np.zeros(theirs.shape, np.uint16)
    for page, target in enumerate(targets):
        for slot in range(16):
            at = int(target) * split + slot // page_size, slice(both.start - first, both.stop - first), slot % page_size
            expected[:, :, *at] = pool[:, :, page, both.start : both.stop, slot]
    assert (landed == expected).all()


def test_frames_and_notes_come_with_the_start_of_the_peer_that_sent_them(children: Children, ends: Ends) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL)
    epoch = joined(end, "p", child.address)
    child.ask("post", "d", [0, 1], [5, 6], "first")
    child.ask("post", "d", [2], [7], "second")
    events = until(end, lambda events: named(events).count("Notified") == 2)
    assert sorted(event.note for event in events if isinstance(event, Notified)) == [b"first", b"second"]
    assert {event.epoch for event in events if isinstance(event, Notified)} == {epoch}


@pytest.mark.parametrize("tls", [TCP, SHARED_MEMORY])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_peer_killed_amid_a_write_is_noticed_at_once_and_usable_when_it_returns(
    children: Children, ends: Ends, tls: str, frozen: bool
) -> None:
    child, end = children("d", LARGE, tls=tls), ends("p", LARGE, tls, value=7)
    epoch = joined(end, "d", child.address)
    if frozen:
        child.freeze()
    handle = end.post("d", epoch, everything(LARGE))
    child.kill()
    killed = time.monotonic()
    events = until(end, lambda events: "PeerFenced" in named(events))
    assert time.monotonic() - killed <= NOTICE_S
    assert named(events) == ["WriteDone", "PeerDown", "PeerFenced"]
    assert isinstance(events[0], WriteDone)
    assert events[0].handle == handle
    assert PeerFenced("d", epoch) in events
    with pytest.raises(TransportError, match="wait for PeerUp"):
        end.post("d", epoch, everything(LARGE))

    port = int(child.address.rpartition(":")[2])
    returned = children("d", LARGE, tls=tls, port=port)
    returned.memory[:] = 0
    events = until(end, lambda events: "PeerUp" in named(events))
    (up,) = [event for event in events if isinstance(event, PeerUp)]
    assert up.epoch != epoch
    with pytest.raises(TransportError, match="this start of it"):
        end.post("d", epoch, everything(LARGE))
    again = end.post("d", up.epoch, everything(LARGE))
    assert WriteDone(again, ok=True) in until(end, lambda events: "WriteDone" in named(events))
    assert pages_of(returned, LARGE, 7) == LARGE.layers * 2 * LARGE.pages


def test_a_frozen_peer_is_never_reported_and_disconnect_ends_its_writes(children: Children, ends: Ends) -> None:
    child, end = children("d", LARGE, tls=TCP), ends("p", LARGE, value=7)
    epoch = joined(end, "d", child.address)
    child.freeze()
    handle = end.post("d", epoch, everything(LARGE))
    end.cancel(handle)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert end.poll() == []
        end.wait(0.05)
    end.forget("d")
    assert named(end.poll()) == ["WriteDone", "PeerDown"]
    child.thaw()
    assert child.ask("wait_for", "PeerDown", 1) == ["PeerUp", "PeerDown"]
    assert pages_of(child, LARGE, 7) < LARGE.layers * 2 * LARGE.pages


def test_a_frozen_writer_goes_on_writing_when_it_wakes_up(children: Children, ends: Ends, tmp_path: Path) -> None:
    """Why pages that were named to a silent writer are quarantined."""
    child, end = children("p", LARGE, tls=TCP), ends("d", LARGE)
    memory = pool_in(tmp_path / "d.pool", LARGE)
    joined(end, "p", child.address)
    tries = range(5)  # a write may be over before its writer is frozen
    assert any(_late_pages(child, memory, lambda: None) > 0 for _ in tries)


def test_a_fenced_writer_on_another_kernel_can_write_no_more(children: Children, ends: Ends, tmp_path: Path) -> None:
    child, end = children("p", LARGE, tls=TCP, kernel="another"), ends("d", LARGE)
    memory = pool_in(tmp_path / "d.pool", LARGE)

    epoch = joined(end, "p", child.address)

    def fence() -> None:
        end.fence("p", epoch)
        assert named(end.poll())[-2:] == ["PeerDown", "PeerFenced"]

    assert _late_pages(child, memory, fence) == 0


def test_a_frozen_writer_on_the_same_kernel_is_fenced_when_it_dies(children: Children, ends: Ends) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL)
    epoch = joined(end, "p", child.address)
    child.freeze()
    end.fence("p", epoch)
    assert named(end.poll()) == ["PeerDown"]
    child.kill()
    assert until(end, bool) == [PeerFenced("p", epoch)]


def test_a_frozen_writer_on_the_same_kernel_is_fenced_when_it_connects_again(children: Children, ends: Ends) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL)
    epoch = joined(end, "p", child.address)
    child.freeze()
    end.disconnect("p")
    child.thaw()
    events = until(end, lambda events: "PeerUp" in named(events))
    assert events[-2:] == [PeerFenced("p", epoch), PeerUp("p", epoch, SMALL)]


def _late_pages(child: PeerProcess, memory: np.ndarray, meanwhile: Callable[[], None]) -> int:
    """Pages of a write that land after its writer was frozen for a while and `meanwhile` was done."""
    child.ask("fill", 7)
    every = list(range(LARGE.layers * 2 * LARGE.pages))
    child.ask("post", "d", every, every, "late")
    child.freeze()
    time.sleep(0.3)  # what is in sockets lands
    meanwhile()
    memory[:] = 0
    child.thaw()
    child.ask("wait_for", "WriteDone", 1)
    return int((memory.reshape(-1, LARGE.page_bytes) == 7).all(axis=1).sum())


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_a_peer_whose_process_cannot_be_watched_is_not_taken_for_dead_but_called_again(
    children: Children, ends: Ends, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL)

    def fails(pid: int) -> int:
        raise OSError(error, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", fails)
        end.connect("p", child.address)
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:
            assert end.poll() == []
            end.wait(0.05)
    epoch = joined(end, "p", child.address)
    child.freeze()
    end.fence("p", epoch)
    assert named(end.poll()) == ["PeerDown"], "it lives"
    child.thaw()


def test_a_peer_that_freezes_while_a_connection_is_made_does_not_stop_this_process(
    children: Children, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL, limits=Limits(silence_s=0.5))
    note = Agent.note
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "note", lambda agent, what: (child.freeze(), note(agent, what)))
        end.connect("p", child.address)
        while "p" not in end._peers:
            assert end.poll() == []
    deadline = time.monotonic() + 5.0
    while "p" in end._peers and time.monotonic() < deadline:
        end.wait(0.05)
        assert end.poll() == [], "it cannot answer a note that came after it froze"
    assert "p" not in end._peers
    child.thaw()
    assert named(until(end, lambda events: "PeerUp" in named(events)))[-2:] == ["PeerFenced", "PeerUp"]


def test_memory_that_nixl_does_not_give_back_is_not_safe_until_the_peer_connects_again(
    children: Children, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, end = children("p", SMALL, tls=TCP, kernel="another"), ends("d", SMALL)
    epoch = joined(end, "p", child.address)
    quietly = Agent._quietly
    with monkeypatch.context() as patch:
        patch.setattr(
            Agent, "_quietly", lambda agent, method, *what: quietly(agent, method, *what) and method != "deregisterMem"
        )
        end.fence("p", epoch)
    assert named(end.poll()) == ["PeerDown"]
    events = until(end, lambda events: "PeerUp" in named(events))
    assert events == [PeerFenced("p", epoch), PeerUp("p", epoch, SMALL)]


@pytest.mark.parametrize("counts", [(5, 4), (5,)], ids=["falls", "outruns"])
def test_a_peer_that_counts_its_writes_wrongly_is_hung_up_on(children: Children, ends: Ends, counts: tuple[int, ...]) -> None:
    child, end = children("p", SMALL, tls=TCP), ends("d", SMALL, limits=Limits(silence_s=0.3))
    joined(end, "p", child.address)
    for count in counts:
        child.ask("say_written", "d", count)
    assert named(until(end, lambda events: "PeerDown" in named(events), 5.0)) == ["PeerDown"]


def test_no_port_of_an_instance_is_open_to_other_machines(children: Children, tmp_path: Path) -> None:
    """NIXL's backend, too, listens: where the instance does."""
    first, second = children("p", SMALL, tls=TCP), children("d", SMALL, tls=TCP)
    first.ask("connect", "d", second.address)
    first.ask("wait_for", "PeerUp", 1)
    for child in (first, second):
        assert len(_listening(child.pid)) > 1
        assert set(_listening(child.pid)) == {"127.0.0.1"}


def _listening(pid: int) -> list[str]:
    """Addresses of version 4 at which this process takes connections; all of version 6 as "v6"."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                packed = bytes.fromhex(fields[1].partition(":")[0])
                found.append(socket.inet_ntoa(packed[::-1]) if table == "tcp" else "v6")
    return found


def test_closing_both_ends_leaves_nothing_and_others_notice(children: Children, ends: Ends) -> None:
    child, end = children("d", SMALL, tls=TCP), ends("p", SMALL)
    joined(end, "d", child.address)
    end.close()
    assert child.ask("wait_for", "PeerDown", 1) == ["PeerUp", "PeerDown"]


def test_two_that_call_each_other_have_one_connection(ends: Ends) -> None:
    one, other = ends("a", SMALL), ends("b", SMALL)
    one.connect("b", other.address)
    other.connect("a", one.address)
    events: dict[str, list[str]] = {"a": [], "b": []}
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        for end in (one, other):
            events[end.name] += named(end.poll())
        one.wait(0.005)
    assert events == {"a": ["PeerUp"], "b": ["PeerUp"]}
