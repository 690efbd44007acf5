from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.api import HandoffId, Limits, LossReason, Ticket, prefix_hash
from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    WIRE_VERSION,
    Accepted,
    Beat,
    Cancel,
    Ended,
    Hello,
    IncompatibleError,
    MalformedError,
    Message,
    Note,
    compatibility,
    decode,
    encode,
)
from tests.examples import tried

LIMITS = Limits(max_prompt_tokens=100, max_handoffs=4, max_frame_bytes=4096)
LAYOUT = KVLayout(layers=2, pages=4, kv_heads=2, page_size=16, head_dim=8, dtype_bytes=2, first_head=2)
HELLO = Hello("c0ffee", "prefill-0", 2**64 - 1, 7, LAYOUT, "host", 4711, b"\x00agent\xff")
TICKET = Ticket(HandoffId(7, 3), 8, (1, 2, 3), 1, (5, 6), (0, 9), prefix_hash((1, 2, 3)), 1.5, False)

MESSAGES: list[Message] = [
    *(HELLO, TICKET, Cancel(3), Accepted(3, TICKET.digest), Ended(3, LossReason.PEER_BUSY), Beat((1, 2), ()), Beat((), (9,))),
    *(Note(3, TICKET.digest, range(2), range(1, 3), None), Note(3, TICKET.digest, range(1, 2), range(3), 2**32 - 1)),
]

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**32, 2**64, 10**400, 0.5, -0.5, float("nan"), float("inf"), "", "x" * 300, "\ud800", "\n"),
    *([], [1], [1] * 101, [True], [-1], [[]], [None], {}, {"a": 1}, "AAA=", "A", "deadline"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_is_decoded_again(message: Message) -> None:
    assert decode(encode(message), LIMITS) == message


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_no_bytes_raise_anything_but_the_named_error(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data, LIMITS)


@settings(deadline=None, max_examples=tried(100))
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_other_fields_is_one_or_raises_the_named_error(message: Message, data: st.DataObject) -> None:
    fields: list[Any] = json.loads(encode(message))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(fields) - 1))
        change = data.draw(st.sampled_from(["replace", "delete", "insert"]))
        fields[at : at + (change != "insert")] = [] if change == "delete" else [data.draw(st.sampled_from(ODD))]
        if not fields:
            break
    try:
        decoded = decode(json.dumps(fields).encode(), LIMITS)
    except MalformedError:
        return
    assert decode(encode(decoded), LIMITS) == decoded


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"[" * 4000, "not JSON"),
        (b"x" * 4097, "at most 4096"),
        (b'["note",1]', "field 1 of note: missing"),
        (b'["cancel",1,2]', "1 too many"),
        (b'["cancel",true]', "a bool"),
        (b'["cancel",-1]', "out of range"),
        (b'["ended",1,"bored"]', "no reason"),
        (b'["beat",[1,2,3,4,5],[]]', "at most 4"),
        (b'["note",1,"x",1,1,0,4,null]', "an empty range"),
        (b'["accepted",1,"\\ud800"]', "unprintable"),
        (b'["hello",1]', f"wire version 1; this end speaks {WIRE_VERSION}"),
        (encode(replace(TICKET, pages=(5,))), "do not fit"),
        (encode(replace(TICKET, start=3)), "do not fit"),
        (encode(replace(TICKET, tokens=(1,) * 101)), "at most 100"),
        (encode(replace(TICKET, seconds=float("nan"))), "not a number of seconds"),
    ],
)
def test_the_error_says_which_field_is_wrong(frame: bytes, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        decode(frame, LIMITS)


def test_ends_are_compatible_exactly_if_they_compute_the_same_kv() -> None:
    one = compatibility("model@1", "bfloat16", LAYOUT, "0.5")
    assert one == compatibility("model@1", "bfloat16", replace(LAYOUT, pages=9, page_size=8, kv_heads=1, first_head=0), "0.5")
    others = {
        compatibility("model@2", "bfloat16", LAYOUT, "0.5"),
        compatibility("model@1", "float16", LAYOUT, "0.5"),
        compatibility("model@1", "bfloat16", replace(LAYOUT, layers=3), "0.5"),
        compatibility("model@1", "bfloat16", replace(LAYOUT, head_dim=4), "0.5"),
        compatibility("model@1", "bfloat16", LAYOUT, "0.6"),
    }
    assert len(others | {one}) == 6


def test_a_stranger_is_told_what_differs() -> None:
    HELLO.check(replace(HELLO, name="decode-0", epoch=1))
    with pytest.raises(IncompatibleError, match="c0ffee here and decaf there"):
        HELLO.check(replace(HELLO, compatibility="decaf"))


def test_a_tickets_digest_changes_with_all_that_a_write_depends_on() -> None:
    changed = [
        replace(TICKET, handoff=HandoffId(7, 4)),
        replace(TICKET, handoff=HandoffId(6, 3)),
        replace(TICKET, prefill_epoch=9),
        replace(TICKET, start=0),
        replace(TICKET, pages=(5, 7)),
        replace(TICKET, generations=(1, 9)),
        replace(TICKET, prefix_hash=prefix_hash((1, 2, 4))),
    ]
    assert len({ticket.digest for ticket in [TICKET, *changed]}) == 8
