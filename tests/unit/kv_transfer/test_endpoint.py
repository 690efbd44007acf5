"""Whole handoffs between endpoints, with real bytes and every fault that a local network knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.api import FenceReason, Fetch, HandoffId, KvTransferError, Landed, LossReason, Lost, Safe, Sent, Wanted
from kv_transfer.endpoint import Endpoint
from kv_transfer.layout import KVLayout
from kv_transfer.local import LocalNetwork, Weather

from .fleet import LAYOUT, LIMITS, Fleet, Instance

PROMPT = tuple(range(100, 123))
SLOW = Weather(latency_s=0.01, bytes_per_s=1000.0, note_s=0.01)  # a write takes longer than to compute what is in it


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Everybody's pages, handoffs and bytes are checked when the test ends."""
    made = Fleet()
    yield made
    made.settle()
    made.check()


def reasons(instance: Instance, handoff: HandoffId) -> list[LossReason]:
    return [event.reason for event in instance.results[handoff] if isinstance(event, Lost)]


def lost(instance: Instance, handoff: HandoffId, reason: LossReason, safe: bool) -> bool:
    """Whether this is all that the engine has been told of the handoff."""
    return instance.results[handoff] == [Lost(handoff, reason, safe)]


# --- nothing goes wrong ---


@pytest.mark.parametrize(
    ("p_layout", "d_layout"),
    [
        (LAYOUT, LAYOUT),
        (replace(LAYOUT, page_size=8, pages=9), LAYOUT),
        (replace(LAYOUT, page_size=6, pages=9), LAYOUT),
        (LAYOUT, replace(LAYOUT, page_size=8, pages=9)),
        (LAYOUT, replace(LAYOUT, kv_heads=2, first_head=1)),
        (replace(LAYOUT, page_size=2, pages=40), replace(LAYOUT, kv_heads=1, first_head=3)),
    ],
)
@pytest.mark.parametrize("checksum", [False, True])
def test_kv_lands_whatever_the_pages_and_heads_of_both_ends(p_layout: KVLayout, d_layout: KVLayout, checksum: bool) -> None:
    fleet = Fleet(Weather(latency_s=0.01, bytes_per_s=1e4, note_s=0.02), checksum)
    p, d = fleet.pair(p_layout, d_layout)
    handoffs = [d.fetch("P", PROMPT, start=d_layout.page_size * n) for n in (0, 1)]
    fleet.run(5.0)
    assert [d.results[h] for h in handoffs] == [
        [Landed(h, range(d_layout.page_size * n, len(PROMPT)))] for n, h in enumerate(handoffs)
    ]
    assert p.sent == [Sent(h, complete=True) for h in handoffs]
    fleet.check()


def test_what_was_received_is_counted_in_tokens_bytes_and_seconds_on_both_ends(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    d.fetch("P", PROMPT, start=4)
    fleet.run(5.0)
    size = 5 * LAYOUT.layers * 2 * LAYOUT.page_bytes
    assert (d.endpoint.stats.landed_tokens, d.endpoint.stats.used_tokens, d.endpoint.stats.landed_bytes) == (19, 19, size)
    assert (p.endpoint.stats.written_bytes, p.endpoint.stats.sent) == (size, 1)
    assert 0.3 < d.endpoint.stats.landing_s < 2.0
    assert d.endpoint.stats.snapshot()["lost"] == {}


def test_the_engine_is_woken_by_every_event(fleet: Fleet) -> None:
    p, d = fleet.pair()
    woken: list[str] = []
    p.endpoint.wake_with(lambda: woken.append("P"))
    d.endpoint.wake_with(lambda: woken.append("D"))
    d.fetch("P", PROMPT)
    fleet.run(5.0)
    assert woken == ["P", "P", "D"] or woken == ["P", "D", "P"]


# --- P goes wrong (rows 1 to 17 of the reported faults have these shapes) ---


@pytest.mark.parametrize("after", [0.02, 0.15, 0.3, 0.5])
def test_a_killed_prefill_instance_is_noticed_and_its_pages_are_safe_at_once(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(after)
    fleet.die(p)
    fleet.run(0.1)
    assert d.results[handoff] == [Lost(handoff, LossReason.PEER_DEAD, safe=False), Safe(handoff)]


@pytest.mark.parametrize("after", [0.02, 0.15, 0.3])
def test_pages_of_a_frozen_prefill_instance_are_kept_until_it_wakes_and_acknowledges(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(after)
    fleet.freeze(p)
    fleet.run(2.0)
    assert d.results[handoff][0] in [
        Lost(handoff, why, safe=False) for why in (LossReason.PEER_SILENT, LossReason.NOT_ACCEPTED)
    ]
    assert len(d.results[handoff]) == 1
    fleet.run(60.0)
    assert len(d.results[handoff]) == 1
    assert d.endpoint.stats.quarantined_pages == 6
    fleet.thaw(p)
    fleet.run(2.0)
    assert d.results[handoff][1:] == [Safe(handoff)]
    after_all = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[after_all][0], Landed), "a returning peer is usable again"


def test_a_frozen_prefill_instance_that_is_killed_then_leaves_its_pages_safe(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    fleet.freeze(p)
    fleet.run(5.0)
    assert lost(d, handoff, LossReason.PEER_SILENT, safe=False)
    fleet.die(p)
    fleet.run(0.1)
    assert d.results[handoff][1:] == [Safe(handoff)]


def test_where_the_right_to_write_can_be_taken_back_a_frozen_peers_pages_are_soon_safe(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.can_revoke = True
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    fleet.freeze(p)
    fleet.run(2.0)
    assert d.results[handoff] == [Lost(handoff, LossReason.PEER_SILENT, safe=False), Safe(handoff)]


def test_a_prefill_instance_that_restarts_under_its_name_is_used_and_its_frozen_ghost_is_not_trusted(fleet: Fleet) -> None:
    ghost, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    fleet.freeze(ghost)
    fleet.run(3.0)
    fleet.add("P")
    fleet.run(1.0)
    again = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[again][0], Landed)
    assert lost(d, handoff, LossReason.PEER_SILENT, safe=False)
    fleet.thaw(ghost)
    fleet.run(3.0)  # its late write lands in quarantine: the ghost has no line over which to say that it is done
    assert lost(d, handoff, LossReason.PEER_SILENT, safe=False)
    fleet.die(ghost)
    fleet.run(0.1)
    assert d.results[handoff][1:] == [Safe(handoff)]


def test_an_engine_that_is_stuck_while_its_endpoint_lives_loses_its_lease(fleet: Fleet) -> None:
    p, d = fleet.pair()
    handoff = d.fetch("P", PROMPT, within=30.0)
    fleet.run(0.02)
    p.stuck = True
    fleet.run(6.0)
    assert d.results[handoff] == [Lost(handoff, LossReason.LEASE_EXPIRED, safe=False), Safe(handoff)]


def test_a_prefill_instance_without_pages_says_so(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.free, kept = [], p.free
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    assert lost(d, handoff, LossReason.PREFILL_FAILED, safe=True)
    p.free = kept


def test_more_handoffs_than_the_limit_are_refused(fleet: Fleet) -> None:
    _, d = fleet.pair()
    d.endpoint._links.limits = replace(LIMITS, max_handoffs=1)
    first, second = d.fetch("P", PROMPT), d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[first][0], Landed)
    assert lost(d, second, LossReason.PEER_BUSY, safe=True)


# --- the line goes wrong ---


@pytest.mark.parametrize("after", [0.02, 0.15, 0.3])
def test_a_cut_line_costs_a_handoff_and_heals(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(after)
    fleet.network.cut("P", "D")
    fleet.run(5.0)
    assert len(d.results[handoff]) == 1
    assert [sent.complete for sent in p.sent] in ([], [False])
    assert p.exports == {}
    fleet.network.heal("P", "D")
    fleet.run(2.0)
    assert d.results[handoff][1:] == [Safe(handoff)]
    again = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[again][0], Landed)


def test_torn_bytes_are_found_by_their_checksum_and_never_used() -> None:
    fleet = Fleet(Weather(tear=True), checksum=True)
    _, d = fleet.pair()
    handoff = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert d.results[handoff] == [Lost(handoff, LossReason.CHECKSUM, safe=False), Safe(handoff)]
    fleet.check()


@pytest.mark.parametrize(
    ("weather", "reason"),
    [(Weather(fail=True), LossReason.WRITE_FAILED), (Weather(notes=0), LossReason.LEASE_EXPIRED)],
)
def test_a_write_that_fails_or_whose_note_is_lost_costs_the_handoff(fleet: Fleet, weather: Weather, reason: LossReason) -> None:
    _, d = fleet.pair()
    fleet.network.weather = weather
    handoff = d.fetch("P", PROMPT)
    fleet.run(5.0)
    assert reasons(d, handoff) == [reason]
    assert len(d.fetches) == 0


def test_repeated_notes_are_refused_counted_and_harmless(fleet: Fleet) -> None:
    _, d = fleet.pair()
    fleet.network.weather = Weather(notes=2)
    handoff = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[handoff][0], Landed)
    assert d.endpoint.stats.fenced[FenceReason.REPLAYED] > 0


# --- D goes wrong ---


@pytest.mark.parametrize("after", [0.02, 0.15, 0.3, 0.5])
def test_a_decode_instance_that_dies_freezes_or_restarts_leaves_no_page_behind_on_the_prefill_side(after: float) -> None:
    for fault in ("die", "freeze"):
        fleet = Fleet()
        p, d = fleet.pair()
        fleet.network.weather = replace(SLOW)
        d.fetch("P", PROMPT)
        fleet.run(after)
        (fleet.die if fault == "die" else fleet.freeze)(d)
        fleet.run(4.0)
        assert (len(p.free), p.exports) == (LAYOUT.pages, {}), fault
        fleet.settle()
        fleet.check()


@pytest.mark.parametrize("after", [0.0, 0.02, 0.15, 0.3, 0.5, 3.0])
def test_a_client_that_leaves_in_any_phase_frees_both_ends(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(after)
    d.endpoint.drop(handoff)
    fleet.run(1.0)
    assert (len(p.free), len(d.free)) == (LAYOUT.pages, LAYOUT.pages)


def test_an_export_that_is_dropped_by_its_engine_ends_as_not_computed(fleet: Fleet) -> None:
    p, d = fleet.pair()
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.02)
    p.exports[handoff].stopped = True
    p.endpoint.drop(handoff)
    fleet.run(0.2)
    assert lost(d, handoff, LossReason.DROPPED, safe=True)


# --- what does not fit, or is not new ---


def test_a_peer_that_is_not_there_or_does_not_fit_costs_nothing(fleet: Fleet) -> None:
    fleet.add("P", replace(LAYOUT, layers=2))
    d = fleet.add("D")
    nobody = d.fetch("P", PROMPT)
    fleet.run(0.1)
    assert lost(d, nobody, LossReason.PEER_UNKNOWN, safe=True)
    d.endpoint.connect("P", "")
    fleet.run(0.1)
    misfit = d.fetch("P", PROMPT)
    fleet.run(0.1)
    assert lost(d, misfit, LossReason.PEER_INCOMPATIBLE, safe=True)
    assert d.endpoint.stats.peers_refused == 1


def test_a_peer_with_only_some_of_our_heads_is_not_asked(fleet: Fleet) -> None:
    _, d = fleet.pair(replace(LAYOUT, kv_heads=2))
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    assert lost(d, handoff, LossReason.PEER_INCOMPATIBLE, safe=True)


def test_a_ticket_or_note_that_comes_again_is_refused_and_counted(fleet: Fleet) -> None:
    """Row 1: a stale handoff, replayed after its pages belong to somebody else."""
    p, d = fleet.pair()
    frames: list[bytes] = []
    notes: list[bytes] = []
    send, post = d.transport.send, p.transport.post
    d.transport.send = lambda peer, frame: (frames.append(frame), send(peer, frame))[1]  # type: ignore[method-assign]
    p.transport.post = lambda peer, write: (notes.append(write.note), post(peer, write))[1]  # type: ignore[method-assign]
    d.fetch("P", PROMPT)
    fleet.run(3.0)
    other = d.fetch("P", PROMPT[::-1])
    fleet.run(0.1)
    for frame in [frame for frame in frames if b"ticket" in frame]:
        send("P", frame)
    for data in notes:
        p.transport.send("D", data)
    fleet.run(3.0)
    assert isinstance(d.results[other][0], Landed)
    assert p.endpoint.stats.fenced == {FenceReason.REPLAYED: 2}
    assert d.endpoint.stats.fenced[FenceReason.UNKNOWN_HANDOFF] > 0


@pytest.mark.parametrize(
    ("change", "fence", "answer"),
    [
        ({"prefill_epoch": 99}, FenceReason.STALE_EPOCH, LossReason.PEER_RESTARTED),
        ({"tokens": (1,) * 23}, FenceReason.PREFIX_MISMATCH, LossReason.STALE_PAGES),
        ({"pages": (0, 1, 2, 3, 4, 4)}, FenceReason.MALFORMED, LossReason.STALE_PAGES),
        ({"pages": (0, 1, 2, 3, 4, 16)}, FenceReason.MALFORMED, LossReason.STALE_PAGES),
        ({"start": 2}, FenceReason.MALFORMED, LossReason.STALE_PAGES),
        ({"seconds": 0.0}, FenceReason.EXPIRED, LossReason.DEADLINE),
    ],
)
def test_a_ticket_that_is_not_meant_so_is_refused_with_its_reason(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], fence: FenceReason, answer: LossReason
) -> None:
    p, d = fleet.pair()
    tell = d.endpoint._links.tell
    monkeypatch.setattr(
        *(d.endpoint._links, "tell"),
        lambda peer, epoch, message: tell(peer, epoch, replace(message, **change) if hasattr(message, "pages") else message),
    )
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.2)
    assert p.endpoint.stats.fenced == {fence: 1}
    assert lost(d, handoff, answer, safe=True)


def test_a_ticket_of_another_start_of_its_sender_is_ignored(fleet: Fleet) -> None:
    p, d = fleet.pair()
    frames: list[bytes] = []
    send = d.transport.send
    d.transport.send = lambda peer, frame: (frames.append(frame), send(peer, frame))[1]  # type: ignore[method-assign]
    d.fetch("P", PROMPT)
    fleet.run(3.0)
    fleet.die(d)
    again = fleet.add("D")
    again.endpoint.connect("P", "")
    fleet.run(0.2)
    again.transport.send("P", next(frame for frame in frames if b"ticket" in frame))
    fleet.run(0.2)
    assert p.endpoint.stats.fenced == {FenceReason.STALE_EPOCH: 1}
    assert p.exports == {}


STRANGE = [
    b'["hello"]',
    b'["beat",[],[]]',
    b'["beat",[0],[0]]',
    b'["ended",0,"deadline"]',
    b'["cancel",0]',
    b'["accepted",0,"x"]',
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=20) | st.sampled_from(STRANGE), max_size=5))
def test_no_frame_stops_an_endpoint(frames: list[bytes]) -> None:
    fleet = Fleet()
    _, d = fleet.pair()
    for frame in frames:
        d.transport.send("P", frame)
    d.fetch("P", PROMPT[:5])
    fleet.run(1.0)
    fleet.check()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"handoff": HandoffId(99, 5)}, "not of this start"),
        ({"start": 2}, "2 of 23 tokens"),
        ({"start": 23}, "23 of 23 tokens"),
        ({"pages": (0, 1)}, "2 pages are not the 6"),
        ({"generations": (0,)}, "6 pages are not the 6"),
        ({"pages": (0, 1, 2, 3, 4, 4)}, "different"),
        ({"pages": (0, 1, 2, 3, 4, 16)}, "not one of 16"),
    ],
)
def test_a_fetch_that_contradicts_itself_is_an_error_of_its_caller(fleet: Fleet, change: dict[str, object], wrong: str) -> None:
    _, d = fleet.pair()
    good = Fetch(HandoffId(d.endpoint.epoch, 5), "P", PROMPT, 0, (0, 1, 2, 3, 4, 5), (0,) * 6, 10.0)
    with pytest.raises(ValueError, match=wrong):
        d.endpoint.fetch(replace(good, **change))  # type: ignore[arg-type]


def test_a_serial_is_used_once(fleet: Fleet) -> None:
    _, d = fleet.pair()
    fetch = d.fetches[d.fetch("P", PROMPT)]
    with pytest.raises(ValueError, match="0 has been used"):
        d.endpoint.fetch(fetch)


# --- the endpoint itself ---


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


def test_closing_an_endpoint_ends_its_handoffs_on_both_sides(fleet: Fleet) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.3)
    d.endpoint.close()
    d.work()
    assert d.results[handoff] == [Lost(handoff, LossReason.PEER_DEAD, safe=True)]
    fleet.run(1.0)
    assert p.exports == {}
    p.endpoint.close()


def test_a_port_that_has_failed_says_so_to_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LocalNetwork(time.monotonic)
    transport = network.add("P", LAYOUT, None)

    def broken() -> list[object]:
        raise OSError("no more memory")

    monkeypatch.setattr(transport, "poll", broken)
    endpoint = Endpoint(transport, LIMITS)
    woken = threading.Event()
    endpoint.wake_with(woken.set)
    endpoint.start()
    assert woken.wait(10.0)
    with pytest.raises(KvTransferError, match="no more memory"):
        endpoint.poll()
    endpoint.close()


# --- everything goes wrong ---

FAULTS = (
    *("fetch", "fetch", "fetch from Q", "drop", "run", "run", "run long", "slow", "fast", "tear", "fail", "lose notes"),
    *("repeat notes", "freeze P", "freeze D", "thaw", "kill P", "restart P", "cut", "heal", "stick P"),
)


def disturb(fleet: Fleet, name: str, p: Instance, d: Instance) -> Instance:
    """Does it; returns P, as it may be another one then."""
    weather = fleet.network.weather
    match name:
        case "fetch" | "fetch from Q" if len(d.free) >= 6 and not d.frozen:
            d.fetch("P" if name == "fetch" else "Q", PROMPT[: 5 + len(d.results) * 5 % 18])
        case "drop" if d.fetches and not d.frozen:
            d.endpoint.drop(next(iter(d.fetches)))
        case "run" | "run long":
            fleet.run(0.12 if name == "run" else 2.6)
        case "slow" | "fast":
            fleet.network.weather = replace(SLOW) if name == "slow" else Weather()
        case "tear":
            weather.tear = True
        case "fail":
            weather.fail = True
        case "lose notes" | "repeat notes":
            weather.notes = 0 if name == "lose notes" else 2
        case "freeze P" | "freeze D":
            victim = p if name == "freeze P" else d
            if not victim.dead and not victim.frozen:
                fleet.freeze(victim)
        case "thaw":
            for instance in (p, d):
                if instance.frozen:
                    fleet.thaw(instance)
        case "kill P" if not p.dead:
            fleet.die(p)
        case "restart P" if p.dead:
            return fleet.add("P")
        case "cut":
            fleet.network.cut("P", "D")
        case "heal":
            fleet.network.heal("P", "D")
        case "stick P":
            p.stuck = True
    return p


@settings(max_examples=20, deadline=None)
@given(st.booleans(), st.lists(st.sampled_from(FAULTS), min_size=3, max_size=14))
def test_whatever_goes_wrong_every_handoff_ends_and_no_page_or_byte_is_wrong(revoke: bool, names: list[str]) -> None:
    fleet = Fleet(replace(SLOW), checksum=True)
    fleet.network.can_revoke = revoke
    p, d = fleet.pair()
    fleet.add("Q")
    d.endpoint.connect("Q", "")
    d.fetch("P", PROMPT)
    for name in names:
        p = disturb(fleet, name, p, d)
    fleet.settle()
    fleet.check()
    if p.dead:
        p = fleet.add("P")
        fleet.run(1.0)
    again = d.fetch("P", PROMPT)
    fleet.run(4.0)
    assert isinstance(d.results[again][0], Landed), "whoever lives is usable again"
    fleet.check()
