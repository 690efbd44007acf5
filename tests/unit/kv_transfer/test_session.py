"""Both ends of one handoff, joined by a line and a memory that do their worst."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Wanted,
    prefix_hash,
)
from kv_transfer.messages import Accepted, Beat, Cancel, Ended, Message, Note
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
    assert d.noted(ALL, True, 8.0) == d.accepted(TICKET.digest, 8.0) == []
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


# --- both ends, and everything that can happen between them ---


@dataclass
class Pair:
    """The two ends of `TICKET`; `truth` is what D's pages really hold, `p` is None before the ticket has come."""

    d: Receiver = field(default_factory=receiver)
    p: Sender | None = None
    now: float = 0.0
    up: bool = True
    dead: bool = False  # P
    to_p: deque[Message] = field(default_factory=lambda: deque([TICKET]))
    to_d: deque[Message] = field(default_factory=deque)
    writes: dict[int, Push] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    truth: np.ndarray = field(default_factory=lambda: np.zeros((LAYERS, TOKENS), bool))
    progress: int = 0  # tokens that P's engine has computed
    fence_asked: bool = False
    d_events: list[PortEvent] = field(default_factory=list)
    p_events: list[PortEvent] = field(default_factory=list)

    @property
    def exposed(self) -> bool:
        """Whether anything could still write into D's pages."""
        could_begin = TICKET in self.to_p
        could_go_on = self.p is not None and self.p.state is not SenderState.CLOSED
        return not self.dead and (could_begin or could_go_on or bool(self.writes))

    def of_d(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(message) if self.up:
                    self.to_p.append(message)
                case Fence():
                    self.fence_asked = True
                case Emit(event):
                    self.d_events.append(event)
                    if isinstance(event, Landed):
                        assert self.truth[:, START:].all(), "incomplete"
                    if event == Safe(TICKET.handoff) or isinstance(event, Landed) or (isinstance(event, Lost) and event.safe):
                        assert isinstance(event, Landed) or not self.exposed, "freed under a writer"

    def of_p(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(message) if self.up:
                    self.to_d.append(message)
                case Push(number):
                    self.writes[number] = action
                case Disconnect():
                    self.cut()
                case Emit(event):
                    self.p_events.append(event)
                    if isinstance(event, Sent):
                        assert not self.writes, "released while it is read"

    def frame_to_p(self) -> None:
        if self.dead or not self.to_p:
            return
        match self.to_p.popleft():
            case Ticket() as ticket:
                self.p = Sender(ticket, LAYERS, PAGE, SLOTS, LIMITS, self.now)
                self.of_p(self.p.start("decode-0"))
            case Cancel(serial):
                known = self.p is not None and self.p.state is not SenderState.CLOSED
                if known and self.p is not None:
                    self.of_p(self.p.stop(LossReason.DROPPED, self.now))
                else:
                    self.of_p([Tell(Ended(serial, LossReason.DROPPED))])
            case Beat() if self.p is not None:
                self.of_p(self.p.renewed(self.now))

    def frame_to_d(self) -> None:
        if not self.to_d:
            return
        match self.to_d.popleft():
            case Accepted(_, digest):
                self.of_d(self.d.accepted(digest, self.now))
            case Ended(_, reason):
                self.of_d(self.d.ended(reason))
            case Beat():
                self.of_d(self.d.renewed(self.now))

    def compute(self, tokens: int, layers: int = LAYERS) -> None:
        if self.p is None or self.dead or self.progress == TOKENS:
            return
        done = range(self.progress, min(self.progress + tokens, TOKENS))
        self.progress = done.stop
        for first in range(0, LAYERS, layers):
            block = range(first, min(first + layers, LAYERS))
            self.of_p(self.p.computed(block, done, pages_of(done), self.now))

    def write(self, ok: bool) -> None:
        """The newest write is over: they may overtake each other."""
        if self.dead or not self.writes or self.p is None:
            return
        number, push = self.writes.popitem()
        if ok:
            self.truth[push.layers.start : push.layers.stop, push.tokens.start : push.tokens.stop] = True
            self.notes.append(note(push.layers, push.tokens))
        self.of_p(self.p.written(number, ok, self.now))

    def note(self, repeat: bool) -> None:
        if self.notes and self.up:
            given = self.notes[-1] if repeat else self.notes.pop()
            self.of_d(self.d.noted(given, True, self.now))

    def cut(self) -> None:
        """The connection ends; what is under way over it comes no more."""
        if not self.up:
            return
        self.up = False
        self.to_p.clear()
        self.to_d.clear()
        self.notes.clear()
        self.of_d(self.d.peer_down(LossReason.PEER_DEAD, self.now))
        if self.p is not None and not self.dead:
            self.of_p(self.p.peer_down(LossReason.PEER_DEAD, self.now))
            for number in tuple(self.writes):
                del self.writes[number]
                self.of_p(self.p.written(number, False, self.now))

    def join(self) -> None:
        if not self.up and not self.dead:
            self.up = True
            self.of_d(self.d.peer_up())

    def die(self) -> None:
        self.dead = True
        self.writes.clear()

    def bury(self) -> None:
        if self.dead:
            self.cut()
            self.of_d(self.d.fenced())

    def beat(self) -> None:
        if self.up:
            self.to_p.append(Beat((3,), ()))
            if self.p is not None and self.p.state is SenderState.PUSHING and not self.dead:
                self.to_d.append(Beat((), (3,)))

    def fail(self) -> None:
        if self.p is not None and not self.dead:
            self.of_p(self.p.stop(LossReason.PREFILL_FAILED, self.now, told=True))

    def drop(self) -> None:
        self.of_d(self.d.lose(LossReason.DROPPED, self.now))

    def pass_time(self, seconds: float, tick_p: bool = True) -> None:
        self.now += seconds
        self.of_d(self.d.tick(self.now))
        if self.p is not None and tick_p and not self.dead:
            self.of_p(self.p.tick(self.now))

    def settle(self) -> None:
        """From now on everything arrives, and what was promised is kept."""
        for _ in range(30):
            self.bury()
            self.join()
            while self.to_p or self.to_d or self.writes or self.notes:
                self.frame_to_p()
                self.frame_to_d()
                self.write(True)
                self.note(repeat=False)
                if self.dead:
                    self.to_p.clear()
            self.pass_time(0.5)

    def check_ends(self) -> None:
        assert self.d.state is ReceiverState.CLOSED
        assert self.d.deadline == float("inf")
        match self.d_events:
            case [Landed()] | [Lost(safe=True)] | [Lost(safe=False), Safe()]:
                pass
            case _:
                raise AssertionError(self.d_events)
        if self.p is not None and not self.dead:
            assert self.p.state is SenderState.CLOSED
            assert isinstance(self.p_events[0], Wanted)
            assert [type(event) for event in self.p_events[1:]] in ([Sent], [Unwanted, Sent])


OPERATIONS = {
    "frame to P": Pair.frame_to_p,
    "frame to D": Pair.frame_to_d,
    "compute a little": lambda pair: pair.compute(3, layers=1),
    "compute a lot": lambda pair: pair.compute(9),
    "write": lambda pair: pair.write(True),
    "write fails": lambda pair: pair.write(False),
    "note": lambda pair: pair.note(repeat=False),
    "note, and it stays": lambda pair: pair.note(repeat=True),
    "cut": Pair.cut,
    "join": Pair.join,
    "P dies": Pair.die,
    "death is seen": Pair.bury,
    "beat": Pair.beat,
    "prefill fails": Pair.fail,
    "drop": Pair.drop,
    "a moment": lambda pair: pair.pass_time(0.3),
    "a while": lambda pair: pair.pass_time(1.1),
    "a while that P sleeps through": lambda pair: pair.pass_time(2.5, tick_p=False),
}
UNDISTURBED = ["frame to P", "frame to D", "compute a lot", "compute a lot", "write", "write", "note", "note"]


def test_an_undisturbed_handoff_lands_and_both_ends_close() -> None:
    pair = Pair()
    for name in UNDISTURBED:
        OPERATIONS[name](pair)
    assert pair.d_events == [LANDED]
    assert pair.p_events[1:] == [Sent(TICKET.handoff, complete=True)]
    pair.check_ends()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(UNDISTURBED)), st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=12))
def test_whatever_happens_both_ends_close_and_no_page_is_used_incomplete_or_freed_under_a_writer(
    undisturbed: int, names: list[str]
) -> None:
    pair = Pair()
    for name in [*UNDISTURBED[:undisturbed], *names]:
        OPERATIONS[name](pair)
    pair.settle()
    pair.check_ends()
