from __future__ import annotations

import pytest

from kv_transfer.greeting import NONCE_BYTES, Greeting, GreetingError


def ends(caller: str = "s", called: str = "s") -> tuple[Greeting, Greeting]:
    return Greeting(caller, called=False), Greeting(called, called=True)


def test_two_ends_with_one_secret_take_each_others_hello_and_never_send_the_secret() -> None:
    caller, called = ends("the fleet's", "the fleet's")
    sent = [caller.call()]
    sent.append(called.answer(sent[-1]))
    caller.take_answer(sent[-1])
    sent.append(caller.seal(b"I am P"))
    assert called.unseal(sent[-1]) == b"I am P"
    sent.append(called.seal(b"I am D"))
    assert caller.unseal(sent[-1]) == b"I am D"
    assert b"fleet" not in b"".join(sent)


def test_who_answers_without_the_secret_is_found_before_the_caller_says_who_it_is() -> None:
    caller, called = ends(called="guessed")
    with pytest.raises(GreetingError, match="another secret"):
        caller.take_answer(called.answer(caller.call()))


def test_who_calls_without_the_secret_is_refused() -> None:
    caller, called = ends(caller="guessed")
    called.answer(caller.call())
    with pytest.raises(GreetingError, match="another secret"):
        called.unseal(caller.seal(b"I am P"))


def test_a_frame_of_one_line_is_of_no_use_on_another() -> None:
    caller, called = ends()
    caller.take_answer(called.answer(caller.call()))
    sealed = caller.seal(b"I am P")
    other, other_called = ends()
    other.take_answer(other_called.answer(other.call()))
    with pytest.raises(GreetingError, match="another secret"):
        other_called.unseal(sealed)


def test_what_one_end_has_said_cannot_be_given_back_to_it() -> None:
    caller, called = ends()
    caller.take_answer(called.answer(caller.call()))
    with pytest.raises(GreetingError, match="another secret"):
        caller.unseal(caller.seal(b"I am P"))
    mirror, _ = ends()
    with pytest.raises(GreetingError, match="another secret"):
        mirror.take_answer(mirror.call() + bytes(32))


def test_a_hello_that_was_changed_on_its_way_is_refused() -> None:
    caller, called = ends()
    caller.take_answer(called.answer(caller.call()))
    sealed = caller.seal(b"I am P")
    with pytest.raises(GreetingError):
        called.unseal(sealed[:-1] + b"Q")


@pytest.mark.parametrize("frame", [b"", b"short", bytes(NONCE_BYTES + 1)])
def test_what_is_no_nonce_begins_nothing(frame: bytes) -> None:
    caller, called = ends()
    with pytest.raises(GreetingError):
        called.answer(frame)
    with pytest.raises(GreetingError):
        called.unseal(bytes(64))
    with pytest.raises(GreetingError):
        caller.take_answer(frame)
