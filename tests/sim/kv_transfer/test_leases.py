"""An engine waits for its device and says nothing: its handoffs live as long as the device may take, and no longer."""

from __future__ import annotations

import pytest

from kv_transfer.api import Landed, LossReason, Lost, Safe

from .fleet import LIMITS, PROMPT, Fleet, Instance


def launch(instance: Instance, device_s: float, said_s: float) -> None:
    """From now on its device takes so long for every block, of which one is all that an export needs."""
    instance.chunk_tokens, instance.block_layers = len(PROMPT), instance.layout.layers
    instance.device_s, instance.said_s = device_s, said_s


def test_a_block_that_takes_longer_than_the_lease_keeps_it_on_both_ends(fleet: Fleet) -> None:
    p, d = fleet.pair()
    launch(p, 4 * LIMITS.lease_s, said_s=5 * LIMITS.lease_s)
    handoff = d.fetch("P", PROMPT, within=60.0)
    fleet.run(4 * LIMITS.lease_s + 2.0)
    assert isinstance(d.results[handoff][0], Landed)
    assert p.sent[0].complete


def test_a_decode_instance_whose_step_takes_longer_than_the_lease_still_gets_its_kv(fleet: Fleet) -> None:
    p, d = fleet.pair()
    p.due = fleet.clock() + 2 * LIMITS.lease_s
    handoff = d.fetch("P", PROMPT, within=60.0)
    launch(d, 4 * LIMITS.lease_s, said_s=5 * LIMITS.lease_s)
    d.launch()
    fleet.run(4 * LIMITS.lease_s + 2.0)
    assert isinstance(d.results[handoff][0], Landed)


def test_a_device_that_takes_longer_than_it_may_counts_as_hung_a_lease_later(fleet: Fleet) -> None:
    p, d = fleet.pair()
    launch(p, 60.0, said_s=2 * LIMITS.lease_s)
    handoff = d.fetch("P", PROMPT, within=50.0)
    fleet.run(3 * LIMITS.lease_s)
    assert d.results[handoff] == [], "it may still be at work"
    fleet.run(LIMITS.lease_s + LIMITS.drain_s)
    assert d.results[handoff] == [Lost(handoff, LossReason.LEASE_EXPIRED, safe=False), Safe(handoff)]
    fleet.run(60.0)


@pytest.mark.parametrize("anew", [0.0, LIMITS.lease_s])
def test_what_was_said_of_one_step_does_not_hold_for_the_next(fleet: Fleet, anew: float) -> None:
    p, d = fleet.pair()
    p.endpoint.busy(20 * LIMITS.lease_s)
    p.endpoint.busy(anew)
    p.stuck = True
    handoff = d.fetch("P", PROMPT, within=60.0)
    fleet.run(anew + 2 * LIMITS.lease_s + LIMITS.drain_s)
    assert d.results[handoff] == [Lost(handoff, LossReason.LEASE_EXPIRED, safe=False), Safe(handoff)]


def test_a_ticket_that_comes_while_the_device_works_waits_for_it(fleet: Fleet) -> None:
    p, d = fleet.pair()
    launch(p, 4 * LIMITS.lease_s, said_s=5 * LIMITS.lease_s)
    handoffs = []
    for tokens in (5, 6, 7):
        handoffs.append(d.fetch("P", PROMPT[:tokens], within=60.0))
        fleet.run(1.5 * LIMITS.lease_s)
    fleet.run(12 * LIMITS.lease_s)
    assert [handoff for handoff in handoffs if not isinstance(d.results[handoff][0], Landed)] == []
