"""Each end of a handoff by itself, one rule at a time."""

from __future__ import annotations

import pytest

from kv_transfer.api import (
    FenceReason,
    HandoffId,
    Landed,
    Limits,
    LossReason,
    Lost,
    PortEvent,
    Safe,
    Sent,
    Ticket,
    Unwanted,
    prefix_hash,
)
from kv_transfer.messages import Cancel, Ended, Message, Note
from kv_transfer.session import (
    Action,
    CancelWrites,
    Disconnect,
    Emit,
    Fence,
    Push,
    Receiver,
    ReceiverState,
    Sender,
    SenderState,
    Tell,
)

LIMITS = Limits(accept_s=1.0, lease_s=3.0, drain_s=1.0)
LAYERS, SLOTS, PAGE, START, TOKENS = 2, 4, 4, 4, 14
TICKET = Ticket(
    HandoffId(7, 3),
    8,
    tuple(range(TOKENS)),
    START,
    (5, 6, 1),
    (0, 9, 2),
    prefix_hash(range(TOKENS)),
    seconds=10.0,
    checksum=False,
)
OTHER = Lost(TICKET.handoff, LossReason.DROPPED, safe=False)


def receiver() -> Receiver:
    return Receiver(TICKET, LAYERS, SLOTS, deadline=10.0, limits=LIMITS, now=0.0)


def sender() -> Sender:
    made = Sender(TICKET, LAYERS, PAGE, SLOTS, LIMITS, now=0.0)
    made.start("decode-0")
    return made


def pages_of(tokens: range) -> list[int]:
    """P's: page i of the prompt is page 10 + i of the pool."""
    return [10 + i for i in range(tokens.start // PAGE, -(-tokens.stop // PAGE))]


def note(layers: range, tokens: range, digest: str = TICKET.digest) -> Note:
    return Note(TICKET.handoff.serial, digest, layers, tokens, None)


def told(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Tell)]


def events(actions: list[Action]) -> list[PortEvent]:
    return [action.event for action in actions if isinstance(action, Emit)]


ALL = note(range(LAYERS), range(START, TOKENS))
LANDED = Landed(TICKET.handoff, range(START, TOKENS))


# --- the receiver, one rule at a time ---


def test_landed_is_said_once_and_only_when_every_layer_of_every_token_is_there() -> None:
    d = receiver()
    assert d.accepted(TICKET.digest, 0.1) == []
    assert d.noted(note(range(1), range(8, TOKENS)), True, 0.2) == []  # notes may overtake each other
    assert d.noted(note(range(1, 2), range(START, TOKENS)), True, 0.3) == []
    assert d.noted(note(range(1), range(START, 8)), True, 0.4) == [Emit(LANDED)]
    assert d.state is ReceiverState.CLOSED
    assert d.noted(ALL, True, 0.5) == d.fenced() == d.ended(LossReason.DROPPED) == []


def test_a_note_may_overtake_the_acceptance() -> None:
    d = receiver()
    assert d.noted(ALL, True, 0.2) == [Emit(LANDED)]
    assert d.accepted(TICKET.digest, 0.3) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (note(range(LAYERS), range(START, TOKENS), "other"), FenceReason.WRONG_TICKET),
        (note(range(LAYERS + 1), range(START, TOKENS)), FenceReason.WRONG_RANGE),
        (note(range(LAYERS), range(TOKENS)), FenceReason.WRONG_RANGE),
        (note(range(LAYERS), range(START, TOKENS + 1)), FenceReason.WRONG_RANGE),
        (note(range(LAYERS), range(START, 10)), FenceReason.WRONG_RANGE),
        (note(range(LAYERS), range(6, TOKENS)), FenceReason.WRONG_RANGE),
    ],
)
def test_a_note_that_does_not_fit_the_ticket_ends_the_handoff(bad: Note, why: FenceReason) -> None:
    d = receiver()
    assert d.fence(bad) is why
    assert d.noted(bad, True, 0.1) == [Tell(Cancel(3)), Emit(Lost(TICKET.handoff, LossReason.STALE_PAGES, safe=False))]


def test_a_repeated_note_is_refused_and_changes_nothing() -> None:
    d = receiver()
    d.noted(note(range(1), range(START, TOKENS)), True, 0.1)
    assert d.fence(note(range(LAYERS), range(START, 8))) is FenceReason.REPLAYED
    assert d.noted(note(range(LAYERS), range(START, 8)), True, 0.2) == []
    assert d.noted(note(range(1, 2), range(START, TOKENS)), True, 0.3) == [Emit(LANDED)]


def test_bytes_with_another_checksum_are_never_used() -> None:
    d = receiver()
    assert events(d.noted(ALL, False, 0.1)) == [Lost(TICKET.handoff, LossReason.CHECKSUM, safe=False)]


def test_what_lands_after_the_deadline_is_lost() -> None:
    d = receiver()
    assert events(d.noted(ALL, True, 10.0)) == [Lost(TICKET.handoff, LossReason.DEADLINE, safe=False)]


def test_an_acceptance_of_something_else_ends_the_handoff() -> None:
    assert events(receiver().accepted("other", 0.1)) == [Lost(TICKET.handoff, LossReason.STALE_PAGES, safe=False)]


def test_a_refusal_leaves_the_pages_safe() -> None:
    assert receiver().ended(LossReason.PEER_BUSY) == [Emit(Lost(TICKET.handoff, LossReason.PEER_BUSY, safe=True))]


def test_the_deadline_of_each_state_ends_it() -> None:
    d = receiver()
    assert d.deadline == 1.0
    assert d.tick(0.9) == []
    assert events(d.tick(1.0)) == [Lost(TICKET.handoff, LossReason.NOT_ACCEPTED, safe=False)]
    d = receiver()
    d.accepted(TICKET.digest, 0.5)
    assert d.deadline == 3.5
    d.renewed(3.0)
    assert events(d.tick(6.0)) == [Lost(TICKET.handoff, LossReason.LEASE_EXPIRED, safe=False)]
    d = receiver()
    d.accepted(TICKET.digest, 0.5)
    d.renewed(9.0)
    assert d.deadline == 10.0
    assert events(d.tick(10.0)) == [Lost(TICKET.handoff, LossReason.DEADLINE, safe=False)]


def test_a_quarantine_asks_again_and_fences_until_somebody_answers() -> None:
    d = receiver()
    assert told(d.lose(LossReason.DROPPED, 5.0)) == [Cancel(3)]
    assert d.tick(6.0) == d.tick(7.0) == [Tell(Cancel(3)), Fence()]
    assert d.peer_down(LossReason.PEER_SILENT, 7.5) == [Fence()]
    assert d.peer_up() == [Tell(Cancel(3))]
    assert d.noted(ALL, True, 8.0) == d.accepted(TICKET.digest, 8.0) == d.renewed(8.0) == []
    assert d.tick(8.9) == [], "a peer that says that it drains is given time"
    assert d.ended(LossReason.DROPPED) == [Emit(Safe(TICKET.handoff))]
    assert d.fenced() == []


# --- the sender, one rule at a time ---


def test_whole_descriptors_are_pushed_as_soon_as_they_are_computed_and_the_rest_at_the_end() -> None:
    p = sender()
    assert p.computed(range(2), range(6), pages_of(range(6)), 0.1) == []  # 4 of them D has, 2 are no descriptor
    assert p.computed(range(2), range(6, 9), pages_of(range(6, 9)), 0.2) == [Push(1, range(2), range(4, 8), (11,), 4)]
    assert p.computed(range(1), range(9, 14), pages_of(range(9, 14)), 0.3) == [Push(2, range(1), range(8, 14), (12, 13), 8)]
    assert p.computed(range(1, 2), range(9, 20), pages_of(range(9, 20)), 0.4) == [
        Push(3, range(1, 2), range(8, 14), (12, 13), 8)
    ]
    assert p.written(1, True, 0.5) == p.written(3, True, 0.6) == []
    assert p.written(2, True, 0.7) == [Emit(Sent(TICKET.handoff, complete=True))]


def test_layers_that_stand_differently_are_pushed_apart() -> None:
    p = sender()
    p.computed(range(1), range(8), pages_of(range(8)), 0.1)
    assert p.computed(range(2), range(4, 12), pages_of(range(4, 12)), 0.2) == [
        Push(2, range(1), range(8, 12), (12,), 8),
        Push(3, range(1, 2), range(4, 12), (11, 12), 4),
    ]


def test_what_is_told_again_is_pushed_once() -> None:
    p = sender()
    assert p.computed(range(1), range(14), pages_of(range(14)), 0.1) == [Push(1, range(1), range(4, 14), (11, 12, 13), 4)]
    every = p.computed(range(2), range(14), pages_of(range(14)), 0.2)
    assert every == [Push(2, range(1, 2), range(4, 14), (11, 12, 13), 4)]


@pytest.mark.parametrize(
    ("layers", "tokens", "pages"),
    [
        (range(2), range(5, 8), [11]),
        (range(3), range(4, 8), [11]),
        (range(2), range(4, 8), [11, 12]),
        (range(2), range(4, 4), []),
    ],
)
def test_a_computed_call_that_breaks_the_rules_ends_the_handoff(layers: range, tokens: range, pages: list[int]) -> None:
    p = sender()
    assert p.computed(layers, tokens, pages, 0.1) == [
        Emit(Unwanted(TICKET.handoff, LossReason.PREFILL_FAILED)),
        Emit(Sent(TICKET.handoff, complete=False)),
        Tell(Ended(3, LossReason.PREFILL_FAILED)),
    ]


def test_a_cancel_is_acknowledged_once_no_write_is_in_flight() -> None:
    p = sender()
    p.computed(range(2), range(14), pages_of(range(14)), 0.1)
    assert p.stop(LossReason.DROPPED, 0.2) == [Emit(Unwanted(TICKET.handoff, LossReason.DROPPED)), CancelWrites((1,))]
    assert p.computed(range(2), range(14), pages_of(range(14)), 0.3) == p.stop(LossReason.DEADLINE, 0.3) == []
    assert p.tick(1.2) == [Disconnect()]
    assert p.written(1, True, 1.3) == [Emit(Sent(TICKET.handoff, complete=False)), Tell(Ended(3, LossReason.DROPPED))]
    assert p.state is SenderState.CLOSED


def test_writes_that_go_on_ending_put_the_disconnect_off() -> None:
    p = sender()
    p.computed(range(1), range(14), pages_of(range(14)), 0.1)
    p.computed(range(1, 2), range(14), pages_of(range(14)), 0.1)
    p.stop(LossReason.DROPPED, 0.2)
    assert p.written(1, True, 1.1) == p.tick(2.0) == []
    assert p.tick(2.1) == [Disconnect()]


def test_a_failed_write_ends_the_handoff() -> None:
    p = sender()
    p.computed(range(2), range(14), pages_of(range(14)), 0.1)
    assert told(p.written(1, False, 0.2)) == [Ended(3, LossReason.WRITE_FAILED)]


def test_nothing_is_written_once_the_lease_or_the_deadline_has_passed() -> None:
    p = sender()
    assert told(p.computed(range(2), range(14), pages_of(range(14)), 3.0)) == [Ended(3, LossReason.LEASE_EXPIRED)]
    p = sender()
    p.renewed(9.0)
    assert told(p.computed(range(2), range(14), pages_of(range(14)), 10.0)) == [Ended(3, LossReason.DEADLINE)]


def test_an_engine_that_gives_up_is_not_told_that_it_has() -> None:
    p = sender()
    assert events(p.stop(LossReason.PREFILL_FAILED, 0.1, told=True)) == [Sent(TICKET.handoff, complete=False)]
