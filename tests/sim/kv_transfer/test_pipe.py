"""Writes between instances of one local network, which share the link of each. All times are exact in binary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api import Notified, Write, WriteDone
from kv_transfer.local import LocalNetwork, LocalTransport
from kv_transfer.pipe import Pipe, carry
from kv_transfer.plan import descriptors, grid
from kv_transfer.weather import Weather

from .fleet import LAYOUT

NAMES = "ABCD"
MOST = 8  # descriptors of a write: the first so many of each pool are read, the others are written
ROWS = descriptors(LAYOUT, grid(LAYOUT, LAYOUT))
SLOT_S = 1 / 8  # that one descriptor takes
LATENCY_S = 1 / 64
WEATHER = Weather(latency_s=LATENCY_S, bytes_per_s=int(ROWS[0, 1]) / SLOT_S)
BEGIN_S = 1.0  # by then everybody is linked
LONG_S = 100 * SLOT_S  # longer than all that is posted


class Post(NamedTuple):
    slot: int  # of the time since `BEGIN_S`
    sender: str
    receiver: str
    size: int  # descriptors


class Ends:
    """Instances that are linked, each to each. Whoever sends a byte has left its mark in it; the others are 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.network = LocalNetwork(lambda: self.now, WEATHER)
        self.memory = {name: np.zeros(LAYOUT.total_bytes, np.uint8) for name in NAMES}
        self.ends: dict[str, LocalTransport] = {}
        self.landed_s: dict[int, float] = {}  # by the number of the write, in the order of landing
        self.over: list[tuple[str, int, bool]] = []  # (sender, handle, whether it went well)
        self.passed: list[tuple[float, dict[tuple[str, str], int]]] = []  # bytes from one to another, each time some may have
        self._written: dict[str, int] = defaultdict(lambda: MOST)  # descriptors of a receiver
        for mark, name in enumerate(NAMES, 1):
            self.memory[name][: int(ROWS[MOST, 0])] = mark
            self.ends[name] = self.network.add(name, LAYOUT, self.memory[name])
        for name in NAMES:
            for peer in NAMES[NAMES.index(name) + 1 :]:
                self.ends[name].connect(peer, "")
        self.pass_until(BEGIN_S)

    def post(self, number: int, sender: str, receiver: str, size: int) -> int:
        """The write's handle."""
        local = np.arange(size, dtype=np.int32)
        remote = np.arange(self._written[receiver], self._written[receiver] + size, dtype=np.int32)
        self._written[receiver] += size
        return self.ends[sender].post(receiver, self.ends[receiver].epoch, Write(local, remote, bytes([number])))

    def pass_until(self, end_s: float) -> None:
        while True:
            for name, end in self.ends.items():
                for event in end.poll():
                    if isinstance(event, Notified):
                        self.landed_s[event.note[0]] = self.now
                    elif isinstance(event, WriteDone):
                        self.over.append((name, event.handle, event.ok))
            self.passed.append((self.now, {(s, r): self.bytes_of(s, r) for s in NAMES for r in NAMES if s != r}))
            if self.now >= end_s:
                return
            self.now = max(self.now, min(self.network.next_due, end_s))

    def bytes_of(self, sender: str, receiver: str) -> int:
        """That have come."""
        return int(np.count_nonzero(self.memory[receiver] == 1 + NAMES.index(sender)))


def played(schedule: Sequence[Post]) -> Ends:
    ends = Ends()
    for number, post in enumerate(schedule):
        ends.pass_until(BEGIN_S + post.slot * SLOT_S)
        ends.post(number, post.sender, post.receiver, post.size)
    ends.pass_until(ends.now + LONG_S)
    return ends


def slot_by_slot(schedule: Sequence[Post]) -> dict[int, float]:
    """When each lands if each slot goes to the first of those posted that finds both its ends free."""
    left = {number: post.size for number, post in enumerate(schedule)}
    landed_s, slot = {}, 0
    while left:
        sending, receiving = set[str](), set[str]()
        for number, post in enumerate(schedule):
            if number in left and post.slot <= slot and post.sender not in sending and post.receiver not in receiving:
                sending.add(post.sender)
                receiving.add(post.receiver)
                left[number] -= 1
                if not left[number]:
                    del left[number]
                    landed_s[number] = BEGIN_S + (slot + 1) * SLOT_S + LATENCY_S
        slot += 1
    return landed_s


def posts(senders: str = NAMES, receivers: str = NAMES) -> st.SearchStrategy[list[Post]]:
    """In order of time."""
    pairs = [(sender, receiver) for sender in senders for receiver in receivers if sender != receiver]
    one = st.tuples(st.integers(0, 20), st.sampled_from(pairs), st.integers(1, MOST))
    made = one.map(lambda drawn: Post(drawn[0], *drawn[1], drawn[2]))
    return st.lists(made, min_size=1, max_size=10).map(lambda drawn: sorted(drawn, key=lambda post: post.slot))


@given(posts())
def test_a_moment_of_two_ends_is_of_the_first_write_posted_that_finds_both_free(schedule: list[Post]) -> None:
    assert played(schedule).landed_s == slot_by_slot(schedule)


@given(posts())
def test_no_more_than_bandwidth_and_time_allow_has_passed_through_either_end(schedule: list[Post]) -> None:
    begin_s = BEGIN_S + schedule[0].slot * SLOT_S + LATENCY_S
    for now, pairs in played(schedule).passed:
        most = max(now - begin_s, 0.0) * WEATHER.bytes_per_s
        for name in NAMES:
            assert sum(size for (sender, _), size in pairs.items() if sender == name) <= most
            assert sum(size for (_, receiver), size in pairs.items() if receiver == name) <= most


@given(posts())
def test_writes_of_a_pair_land_in_the_order_of_posting(schedule: list[Post]) -> None:
    landed = list(played(schedule).landed_s)
    assert len(landed) == len(schedule)
    for pair in {(post.sender, post.receiver) for post in schedule}:
        mine = [number for number in landed if (schedule[number].sender, schedule[number].receiver) == pair]
        assert mine == sorted(mine)


@pytest.mark.parametrize("size", [1, 5, MOST])
def test_a_write_alone_takes_its_latency_and_its_bytes_half_of_which_are_there_at_half_of_their_time(size: int) -> None:
    ends = played([Post(0, "A", "B", size)])
    assert ends.landed_s == {0: BEGIN_S + LATENCY_S + size * SLOT_S}
    half_s = BEGIN_S + LATENCY_S + size * SLOT_S / 2
    assert [pairs["A", "B"] for now, pairs in ends.passed if now == half_s] == [size // 2 * int(ROWS[0, 1])]


@given(posts("AB", "AB"), posts("CD", "CD"))
def test_pairs_without_an_end_in_common_do_not_hold_each_other_up(ours: list[Post], theirs: list[Post]) -> None:
    both = sorted([*ours, *theirs], key=lambda post: post.slot)
    landed_s = played(both).landed_s
    mine = [landed_s[number] for number, post in enumerate(both) if post.sender in "AB"]
    assert mine == [when for _, when in sorted(played(ours).landed_s.items())]


def test_an_instance_sends_at_full_bandwidth_while_it_receives() -> None:
    ends = played([Post(0, "A", "B", 4), Post(0, "B", "A", 4)])
    assert set(ends.landed_s.values()) == {BEGIN_S + LATENCY_S + 4 * SLOT_S}


def test_a_write_that_waits_for_its_receiver_leaves_its_senders_link_to_the_next() -> None:
    ends = played([Post(0, "A", "B", 4), Post(0, "C", "B", 4), Post(0, "C", "D", 4)])
    assert list(ends.landed_s) == [0, 2, 1]
    assert ends.landed_s[2] == ends.landed_s[0] == ends.landed_s[1] - 4 * SLOT_S


def test_a_write_that_is_cancelled_has_its_time_all_the_same() -> None:
    ends = Ends()
    cancelled = ends.post(0, "A", "B", 4)
    after = ends.post(1, "A", "B", 4)
    ends.ends["A"].cancel(cancelled)
    ends.pass_until(BEGIN_S + LONG_S)
    assert ends.over == [("A", cancelled, False), ("A", after, True)]
    assert ends.landed_s == {1: BEGIN_S + LATENCY_S + 8 * SLOT_S}
    assert ends.bytes_of("A", "B") == 4 * int(ROWS[0, 1])


def test_a_frozen_sender_holds_nobody_else_up_for_longer_than_its_write_takes() -> None:
    ends = Ends()
    ends.post(0, "A", "B", 4)
    ends.post(1, "C", "B", 4)
    ends.network.freeze(ends.ends["A"])
    ends.pass_until(BEGIN_S + LONG_S)
    assert ends.landed_s == {1: BEGIN_S + LATENCY_S + 8 * SLOT_S}
    ends.network.thaw(ends.ends["A"])
    ends.pass_until(BEGIN_S + LONG_S + SLOT_S)
    assert ends.landed_s[0] == BEGIN_S + LONG_S


def test_half_of_a_write_that_is_interrupted_has_moved_when_half_of_its_time_is_over() -> None:
    out, into = Pipe(), Pipe()
    into.give(1.0, 3.0)
    assert carry(out, into, 0.0, 3.0) == (3.5, 5.0)  # a second before the other write, two after it
