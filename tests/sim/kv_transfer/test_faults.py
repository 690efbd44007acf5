"""Every fault that a local network knows, with real bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.api import FenceReason, Landed, LossReason, Lost, Safe, TransportError, Write
from kv_transfer.weather import Weather
from tests.examples import tried

from .fleet import COMPUTE_S, LAYOUT, LIMITS, PROMPT, SLOW, Fleet, Instance, lost, reasons

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


def test_a_prefill_that_waits_longer_than_the_lease_keeps_it_while_its_engine_lives(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.due = fleet.clock() + 4 * LIMITS.lease_s
    handoff = d.fetch("P", PROMPT, within=30.0)
    fleet.run(5 * LIMITS.lease_s)
    assert isinstance(d.results[handoff][0], Landed)


def test_each_handoff_ends_at_its_own_deadline_whatever_those_before_it_do(fleet: Fleet) -> None:
    """Row 14."""
    p, d = fleet.pair()
    p.due = fleet.clock() + 2 * LIMITS.lease_s
    first, short, last = (d.fetch("P", PROMPT[:5], within=within) for within in (30.0, 1.0, 30.0))
    fleet.run(1.5)
    assert reasons(d, short) == [LossReason.DEADLINE]
    assert d.results[first] == d.results[last] == []
    fleet.run(3 * LIMITS.lease_s)
    assert isinstance(d.results[first][0], Landed)
    assert isinstance(d.results[last][0], Landed)


@pytest.mark.parametrize("heads", [LAYOUT.kv_heads, 1], ids=["equal", "one of four"])
def test_many_handoffs_at_once_keep_their_leases_while_they_wait_for_each_other(heads: int) -> None:
    """Rows 15 and 43."""
    fleet = Fleet()
    p, d = fleet.pair(replace(LAYOUT, pages=256), replace(LAYOUT, pages=256, kv_heads=heads, first_head=0))
    p.block_layers = LAYOUT.layers
    handoffs = [d.fetch("P", (serial, *PROMPT[:4]), within=60.0) for serial in range(128)]
    fleet.run(128 * COMPUTE_S + 1.0)
    assert 3 * LIMITS.lease_s < 128 * COMPUTE_S, "the last one waits longer than a lease"
    assert [handoff for handoff in handoffs if not isinstance(d.results[handoff][0], Landed)] == []
    fleet.check()


def test_after_a_long_time_without_any_a_handoff_is_served(fleet: Fleet) -> None:
    """Row 42."""
    _, d = fleet.pair()
    fleet.run(120.0)
    handoff = d.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(d.results[handoff][0], Landed)


def test_nothing_is_posted_after_a_post_that_failed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = fleet.pair()
    handoff = d.fetch("P", PROMPT)
    d.endpoint.step()
    p.endpoint.step()
    posted: list[str] = []

    def broken(peer: str, epoch: int, write: Write) -> int:
        posted.append(peer)
        raise TransportError("no more memory")

    p.endpoint.computed(handoff, range(1), range(4), [0])
    p.endpoint.step()
    monkeypatch.setattr(p.transport, "post", broken)
    p.endpoint.computed(handoff, range(3), range(8), [0, 1])  # layers that stand differently are pushed apart
    p.endpoint.step()
    assert posted == ["D"]
    fleet.run(1.0)
    assert reasons(d, handoff) == [LossReason.WRITE_FAILED]


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
    fleet.run(0.1)
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
def test_a_killed_decode_instance_leaves_no_page_behind_and_its_next_start_is_served(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    for _ in range(2):
        d.fetch("P", PROMPT[:12])
    fleet.run(after)
    fleet.die(d)
    fleet.run(0.02)
    assert (len(p.free), p.exports) == (LAYOUT.pages, {})
    again = fleet.add("D")
    again.endpoint.connect("P", "")
    fleet.run(0.1)
    handoff = again.fetch("P", PROMPT)
    fleet.run(3.0)
    assert isinstance(again.results[handoff][0], Landed)


@pytest.mark.parametrize("after", [0.02, 0.15, 0.3, 0.5])
def test_a_frozen_decode_instance_leaves_no_page_behind(fleet: Fleet, after: float) -> None:
    p, d = fleet.pair()
    fleet.network.weather = replace(SLOW)
    d.fetch("P", PROMPT)
    fleet.run(after)
    fleet.freeze(d)
    fleet.run(3.0)
    assert (len(p.free), p.exports) == (LAYOUT.pages, {})


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


# --- everything goes wrong ---

FAULTS = (
    *("fetch", "fetch", "fetch from Q", "drop", "run", "run", "run long", "slow", "fast", "tear", "fail", "lose notes"),
    *("repeat notes", "freeze P", "freeze D", "thaw", "kill P", "restart P", "kill D", "restart D", "cut", "heal", "stick P"),
)


def start_d(fleet: Fleet) -> Instance:
    d = fleet.add("D")
    for peer in ("P", "Q"):
        d.endpoint.connect(peer, "")
    return d


def disturb(fleet: Fleet, name: str, p: Instance, d: Instance) -> tuple[Instance, Instance]:
    """Does it; returns P and D, either of which may be another one then."""
    weather = fleet.network.weather
    match name:
        case "fetch" | "fetch from Q" if len(d.free) >= 6 and not (d.frozen or d.dead):
            d.fetch("P" if name == "fetch" else "Q", PROMPT[: 5 + len(d.results) * 5 % 18])
        case "drop" if d.fetches and not (d.frozen or d.dead):
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
        case "kill P" | "kill D":
            victim = p if name == "kill P" else d
            if not victim.dead:
                fleet.die(victim)
        case "restart P" if p.dead:
            return fleet.add("P"), d
        case "restart D" if d.dead:
            return p, start_d(fleet)
        case "cut":
            fleet.network.cut("P", "D")
        case "heal":
            fleet.network.heal("P", "D")
        case "stick P":
            p.stuck = True
    return p, d


@settings(max_examples=tried(20), deadline=None)
@given(st.booleans(), st.lists(st.sampled_from(FAULTS), min_size=3, max_size=14))
def test_whatever_goes_wrong_every_handoff_ends_and_no_page_or_byte_is_wrong(revoke: bool, names: list[str]) -> None:
    fleet = Fleet(replace(SLOW), checksum=True)
    fleet.network.can_revoke = revoke
    p, d = fleet.pair()
    fleet.add("Q")
    d.endpoint.connect("Q", "")
    d.fetch("P", PROMPT)
    for name in names:
        p, d = disturb(fleet, name, p, d)
    fleet.settle()
    fleet.check()
    p = fleet.add("P") if p.dead else p
    d = start_d(fleet) if d.dead else d
    fleet.run(1.0)
    again = d.fetch("P", PROMPT)
    fleet.run(4.0)
    assert isinstance(d.results[again][0], Landed), "whoever lives is usable again"
    fleet.check()
