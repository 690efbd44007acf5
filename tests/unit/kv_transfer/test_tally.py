"""What a writer says of its writes, and what its peer makes of that."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.messages import MalformedError
from kv_transfer.tally import Tally

PATIENCE_S = 2.0


def said(over: int) -> bytes:
    return struct.pack(">Q", over)


def test_the_peer_is_told_once_of_all_writes_that_are_over() -> None:
    writer = Tally()
    assert writer.frame() is None
    writer.end()
    writer.end()
    assert writer.frame() == said(2)
    assert writer.frame() is None


def test_a_note_is_looked_for_from_the_end_of_its_write_until_it_has_come() -> None:
    reader = Tally()
    assert not reader.looks
    reader.hear(said(1), 0.0)
    assert reader.looks
    reader.note(0.1)
    assert not reader.looks


def test_a_note_that_comes_before_its_frame_counts() -> None:
    reader = Tally()
    reader.note(0.0)
    reader.hear(said(1), 0.1)
    assert not reader.looks


def test_a_note_is_overdue_when_none_has_come_for_a_while() -> None:
    reader = Tally()
    reader.hear(said(2), 1000.0)
    assert reader.overdue(1000.0 + PATIENCE_S, PATIENCE_S) is None
    assert "2 of its writes are said to be over, and 0 notes" in (reader.overdue(1000.1 + PATIENCE_S, PATIENCE_S) or "")
    reader.note(1003.0)
    assert reader.overdue(1003.0 + PATIENCE_S, PATIENCE_S) is None, "every note gives the next one new patience"
    assert reader.overdue(1003.1 + PATIENCE_S, PATIENCE_S) is not None
    reader.note(1006.0)
    assert reader.overdue(2000.0, PATIENCE_S) is None


@pytest.mark.parametrize("frame", [said(4), b"", said(6)[:-1], said(6) * 2], ids=["fewer", "empty", "cut", "long"])
def test_counts_that_cannot_be_are_refused(frame: bytes) -> None:
    reader = Tally()
    reader.hear(said(5), 0.0)
    with pytest.raises(MalformedError):
        reader.hear(frame, 1.0)


@given(st.lists(st.sampled_from(["end", "tell", "note"]), max_size=60))
def test_whatever_the_order_notes_are_looked_for_exactly_while_some_are_due(steps: list[str]) -> None:
    writer, reader = Tally(), Tally()
    over = told = noted = 0
    for now, step in enumerate(steps):
        if step == "end":
            over += 1
            writer.end()
        elif step == "tell" and (frame := writer.frame()) is not None:
            told = over
            reader.hear(frame, now)
        elif step == "note" and noted < over:
            noted += 1
            reader.note(now)
        assert reader.looks == (noted < told)
        assert (reader.overdue(now + 100.0, PATIENCE_S) is not None) == reader.looks
