"""An endpoint in a thread of its own, when it is closed, fails or hangs, and what it expects of its engine and its peers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.api import (
    Fetch,
    HandoffId,
    KvTransferError,
    Landed,
    LossReason,
    Lost,
    Safe,
    Sent,
    TransportEvent,
    Wanted,
)
from kv_transfer.endpoint import Endpoint
from kv_transfer.local import LocalNetwork

from .fleet import LAYOUT, LIMITS, PROMPT, SLOW, Fleet, lost


def test_an_endpoint_with_a_thread_lands_kv_in_real_time_and_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    network = LocalNetwork(time.monotonic)
    pools = {name: np.zeros(LAYOUT.total_bytes, np.uint8) for name in "PD"}
    p, d = (Endpoint(network.add(name, LAYOUT, pools[name]), LIMITS, checksum=True) for name in "PD")
    woken = threading.Event()
    for endpoint in (p, d):
        endpoint.wake_with(woken.set)
        endpoint.start()
    d.connect("P", "")
    pools["P"][:] = 7
    until = time.monotonic() + 10.0
    while not d.peers() and time.monotonic() < until:
        time.sleep(0.001)
    handoff = HandoffId(d.epoch, 0)
    d.fetch(Fetch(handoff, "P", PROMPT, 0, (0, 1, 2, 3, 4, 5), (0,) * 6, time.monotonic() + 10.0))
    landed: list[object] = []
    while not landed and time.monotonic() < until:
        woken.wait(1.0)
        woken.clear()
        for event in p.poll():
            if isinstance(event, Wanted):
                p.computed(event.handoff, range(LAYOUT.layers), range(len(PROMPT)), range(6))
        landed.extend(d.poll())
    assert landed == [Landed(handoff, range(len(PROMPT)))]
    d.close()
    p.close()
    assert set(threading.enumerate()) == before
    assert (pools["D"] == 7).sum() == 6 * LAYOUT.layers * 2 * LAYOUT.page_bytes


def test_a_wake_that_comes_before_the_wait_is_not_lost() -> None:
    transport = LocalNetwork(time.monotonic).add("D", LAYOUT, None)
    transport.wake()
    waiting = threading.Thread(target=transport.wait, args=(60.0,), daemon=True)
    waiting.start()
    waiting.join(10.0)
    assert not waiting.is_alive()


@pytest.mark.parametrize("revoke", [True, False])
def test_closing_an_endpoint_ends_its_handoffs_on_both_sides_and_promises_nothing_of_who_can_still_write(revoke: bool) -> None:
    fleet = Fleet(replace(SLOW))
    fleet.network.can_revoke = revoke
    p, d = fleet.pair()
    first = d.fetch("P", PROMPT)
    fleet.run(0.3)
    fleet.freeze(p)
    fleet.run(2.0)
    second = d.fetch("P", PROMPT[:5])
    d.endpoint.close()
    d.work()
    safe = [Safe(first)] if revoke else []
    assert d.results[first] == [Lost(first, LossReason.PEER_SILENT, safe=False), *safe]
    assert lost(d, second, LossReason.PEER_UNKNOWN, safe=True), "a fetch that crosses the close is answered, too"
    third = d.fetch("P", PROMPT[:5])
    d.work()
    assert lost(d, third, LossReason.PEER_UNKNOWN, safe=True)
    d.dead = True
    fleet.settle()
    fleet.check()


def test_closing_an_endpoint_amid_a_transfer_ends_it_on_both_sides(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.can_revoke = True
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    d.endpoint.close()
    d.work()
    assert d.results[handoff] == [Lost(handoff, LossReason.PEER_DEAD, safe=False), Safe(handoff)]
    fleet.run(1.0)
    assert p.exports == {}


def test_closing_an_endpoint_ends_its_exports_too(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    d.fetch("P", PROMPT)
    fleet.run(0.3)
    p.endpoint.close()
    p.work()
    assert p.exports == {}
    assert p.sent[0].complete is False


@pytest.mark.parametrize("name", ["P", "D"])
def test_a_port_that_has_failed_ends_its_handoffs_and_then_says_so_to_its_engine(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    p, d = fleet.pair()
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    failing = p if name == "P" else d

    def broken(now: float) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(failing.endpoint._receivers, "tick", broken)
    failing.endpoint.start()
    failing.endpoint._thread.join(10.0)  # type: ignore[union-attr]
    failing.dead = True  # to the fleet: its thread is gone
    failing.work()
    if name == "P":
        assert p.sent == [Sent(handoff, complete=False)], "its pages are read no more"
    else:
        assert lost(d, handoff, LossReason.PEER_DEAD, safe=False)
    late = failing.fetch("P", PROMPT[:5])
    failing.work()
    assert lost(failing, late, LossReason.PEER_UNKNOWN, safe=True)
    with pytest.raises(KvTransferError, match="no more memory"):
        failing.endpoint.poll()
    failing.endpoint.close()


def test_a_thread_that_hangs_is_reported_to_an_engine_that_goes_on_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    transport = LocalNetwork(lambda: now).add("D", LAYOUT, None)
    inside, go_on = threading.Event(), threading.Event()

    def hangs() -> list[TransportEvent]:
        inside.set()
        go_on.wait(60.0)
        return []

    monkeypatch.setattr(transport, "poll", hangs)
    endpoint = Endpoint(transport, replace(LIMITS, hang_s=10.0), clock=lambda: now)
    endpoint.start()
    assert inside.wait(10.0)
    endpoint.poll()
    now = 60.0  # the whole process stood still
    endpoint.poll()
    for _ in range(8):
        now += 1.0
        assert endpoint.poll() == []
    now += 1.0
    with pytest.raises(KvTransferError, match=r"a step of its thread has not ended for 10.0 s"):
        endpoint.poll()
    go_on.set()
    endpoint.close()


@pytest.mark.parametrize("address", ["prefill-0:5600", "10.0.0.1:99999"])
def test_a_peer_whose_address_is_none_is_refused_and_everything_else_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    _, d = fleet.pair()

    def refuses(peer: str, address: str) -> None:
        raise ValueError(f"{address!r} is no address")

    with monkeypatch.context() as patch:
        patch.setattr(d.transport, "connect", refuses)
        d.endpoint.connect("Q", address)
        fleet.run(0.1)
    handoffs = d.fetch("Q", PROMPT), d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert lost(d, handoffs[0], LossReason.PEER_INCOMPATIBLE, safe=True)
    assert d.results[handoffs[1]] == [Landed(handoffs[1], range(len(PROMPT)))]


def test_a_peer_is_forgotten_only_when_no_page_waits_for_its_word(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    fleet.freeze(p)
    fleet.run(3.0)
    d.endpoint.forget("P")
    fleet.run(3.0)
    assert d.endpoint.stats.quarantined_pages == 6
    fleet.thaw(p)
    fleet.run(3.0)
    assert d.results[handoff][1:] == [Safe(handoff)]
    assert d.endpoint.peers() == {}, "and then it is"


def test_who_looks_for_peers_is_not_taken_for_an_engine_at_work(fleet: Fleet) -> None:
    p, d = fleet.pair()
    handoff = d.fetch("P", PROMPT, within=60.0)
    fleet.run(0.02)
    p.stuck = True
    for _ in range(6):
        p.endpoint.connect("Q", "")
        fleet.run(1.0)
    assert d.results[handoff] == [Lost(handoff, LossReason.LEASE_EXPIRED, safe=False), Safe(handoff)]


def test_an_engine_that_takes_in_nothing_is_given_no_more_to_take_in(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.stuck = True
    for _ in range(3):
        d.fetch("P", PROMPT[:5])
        fleet.run(4.0)
    assert p.endpoint.stats.wanted == 1
    last = d.fetch("P", PROMPT)
    fleet.run(0.2)
    assert lost(d, last, LossReason.PEER_BUSY, safe=True)


def test_a_prompt_that_is_longer_than_a_transfer_takes_is_no_error_of_its_engine(fleet: Fleet) -> None:
    _, d = fleet.pair()
    d.endpoint._links.limits = replace(LIMITS, max_prompt_tokens=22)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    assert lost(d, handoff, LossReason.TOO_LONG, safe=True)
