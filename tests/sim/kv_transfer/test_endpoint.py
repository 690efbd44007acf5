"""Whole handoffs between endpoints, with real bytes and every fault that a local network knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.api import (
    FenceReason,
    Fetch,
    HandoffId,
    Landed,
    LossReason,
    Notified,
    Sent,
)
from kv_transfer.layout import KVLayout
from kv_transfer.messages import Ended, Note, encode
from kv_transfer.weather import Weather
from tests.examples import tried

from .fleet import LAYOUT, LIMITS, PROMPT, SLOW, Fleet, lost

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
    assert (d.endpoint.stats.landed_tokens, d.endpoint.stats.landed_bytes) == (19, size)
    assert (p.endpoint.stats.written_bytes, p.endpoint.stats.sent) == (size, 1)
    assert 0.3 < d.endpoint.stats.landing_s < 2.0
    assert d.endpoint.stats.lost.total() == 0


def test_the_engine_is_woken_by_every_event(fleet: Fleet) -> None:
    p, d = fleet.pair()
    woken: list[str] = []
    p.endpoint.wake_with(lambda: woken.append("P"))
    d.endpoint.wake_with(lambda: woken.append("D"))
    d.fetch("P", PROMPT)
    fleet.run(5.0)
    assert woken == ["P", "P", "D"] or woken == ["P", "D", "P"]


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
    d.transport.send = lambda peer, epoch, frame: frames.append(frame) or send(peer, epoch, frame)  # type: ignore[method-assign,func-returns-value]
    p.transport.post = lambda peer, epoch, write: notes.append(write.note) or post(peer, epoch, write)  # type: ignore[method-assign,func-returns-value]
    d.fetch("P", PROMPT)
    fleet.run(3.0)
    other = d.fetch("P", PROMPT[::-1])
    fleet.run(0.1)
    for frame in [frame for frame in frames if b"ticket" in frame]:
        send("P", p.endpoint.epoch, frame)
    for data in notes:
        d.transport.push(Notified("P", p.endpoint.epoch, data))
    fleet.run(3.0)
    assert isinstance(d.results[other][0], Landed)
    assert +p.endpoint.stats.fenced == {FenceReason.REPLAYED: 2}
    assert d.endpoint.stats.fenced[FenceReason.UNKNOWN_HANDOFF] > 0


def test_what_has_landed_is_said_by_writes_alone_and_never_by_a_frame(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.stuck = True
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    ticket = d.endpoint._receivers._records[0].session.ticket
    lie = Note(handoff.serial, ticket.digest, range(LAYOUT.layers), range(len(PROMPT)), None)
    p.transport.send("D", d.endpoint.epoch, encode(lie))
    d.transport.push(Notified("P", p.endpoint.epoch, encode(Ended(handoff.serial, LossReason.DROPPED))))
    fleet.run(0.1)
    assert d.results[handoff] == []
    assert +d.endpoint.stats.fenced == {FenceReason.MALFORMED: 2}


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
    assert +p.endpoint.stats.fenced == {fence: 1}
    assert lost(d, handoff, answer, safe=True)


def test_a_ticket_of_another_start_of_its_sender_is_ignored(fleet: Fleet) -> None:
    p, d = fleet.pair()
    frames: list[bytes] = []
    send = d.transport.send
    d.transport.send = lambda peer, epoch, frame: frames.append(frame) or send(peer, epoch, frame)  # type: ignore[method-assign,func-returns-value]
    d.fetch("P", PROMPT)
    fleet.run(3.0)
    fleet.die(d)
    again = fleet.add("D")
    again.endpoint.connect("P", "")
    fleet.run(0.2)
    again.transport.send("P", p.endpoint.epoch, next(frame for frame in frames if b"ticket" in frame))
    fleet.run(0.2)
    assert +p.endpoint.stats.fenced == {FenceReason.STALE_EPOCH: 1}
    assert p.exports == {}


STRANGE = [
    b'["hello"]',
    b'["beat",[],[]]',
    b'["beat",[0],[0]]',
    b'["ended",0,"deadline"]',
    b'["cancel",0]',
    b'["accepted",0,"x"]',
]


@settings(max_examples=tried(30), deadline=None)
@given(st.lists(st.binary(max_size=20) | st.sampled_from(STRANGE), max_size=5))
def test_no_frame_stops_an_endpoint(frames: list[bytes]) -> None:
    fleet = Fleet()
    p, d = fleet.pair()
    for frame in frames:
        d.transport.send("P", p.endpoint.epoch, frame)
    d.fetch("P", PROMPT[:5])
    fleet.run(1.0)
    fleet.check()


def test_a_note_that_is_longer_than_any_is_refused_and_counted(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.stuck = True
    handoff = d.fetch("P", PROMPT)
    fleet.run(0.1)
    digest = d.endpoint._receivers._records[handoff.serial].session.ticket.digest
    note = encode(Note(handoff.serial, digest, range(LAYOUT.layers), range(len(PROMPT)), None))
    d.transport.push(Notified("P", p.endpoint.epoch, note.ljust(LIMITS.max_note_bytes + 1)))
    fleet.run(0.1)
    assert d.results[handoff] == []
    assert +d.endpoint.stats.fenced == {FenceReason.MALFORMED: 1}


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
