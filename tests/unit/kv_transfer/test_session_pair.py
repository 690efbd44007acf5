"""Both ends of one handoff, joined by a line and a memory that do their worst."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.api import Landed, LossReason, Lost, PortEvent, Safe, Sent, Ticket, Unwanted, Wanted
from kv_transfer.messages import Accepted, Beat, Cancel, Ended, Message, Note
from kv_transfer.session import Action, Disconnect, Emit, Fence, Push, Receiver, ReceiverState, Sender, SenderState, Tell
from tests.examples import tried

from .test_session import LANDED, LAYERS, LIMITS, PAGE, SLOTS, START, TICKET, TOKENS, note, pages_of, receiver


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
            if self.p is not None and self.p.state is not SenderState.CLOSED and not self.dead:
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


@settings(max_examples=tried(150), deadline=None)
@given(st.integers(0, len(UNDISTURBED)), st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=12))
def test_whatever_happens_both_ends_close_and_no_page_is_used_incomplete_or_freed_under_a_writer(
    undisturbed: int, names: list[str]
) -> None:
    pair = Pair()
    for name in [*UNDISTURBED[:undisturbed], *names]:
        OPERATIONS[name](pair)
    pair.settle()
    pair.check_ends()
