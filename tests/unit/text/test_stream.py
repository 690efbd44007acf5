from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.text.stream import TextStream

from .small import EOS, SmallTokenizer, byte_fallback, byte_level

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
BY_LIBRARY = byte_level(by_library=True)
TOKENIZERS = [BYTE_LEVEL, BY_LIBRARY, BYTE_FALLBACK]
texts = st.text(st.sampled_from("abcstop \n\u00e9\u20ac\U0001f600"), max_size=40)
stops = st.lists(st.text(st.sampled_from("abcstop \u00e9"), min_size=1, max_size=5), max_size=4).map(tuple)


def stream(
    tokens: list[int], tokenizer: SmallTokenizer = BYTE_LEVEL, stop: tuple[str, ...] = (), min_tokens: int = 0
) -> list[str]:
    """What each push shows, then what `finish` shows."""
    text = TextStream(tokenizer, stop, min_tokens)
    return [*(text.push(t) for t in tokens), text.finish()]


def cut_at_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """The rule, spelled out: the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(s) for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(complete)]
    return text


@st.composite
def splits(draw: st.DrawFn, text: str, tokenizer: SmallTokenizer) -> list[int]:
    """The text's tokens, cut at a random place first, so that other tokens come out, with special tokens strewn in."""
    if tokenizer is BYTE_FALLBACK:  # a piece of text of its own would begin with a space
        tokens = tokenizer.encode(text)
    else:
        cut = draw(st.integers(0, len(text)))
        tokens = tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:])
    if draw(st.booleans()):
        tokens.insert(draw(st.integers(0, len(tokens))), tokenizer.backend.token_to_id(EOS))
    return tokens


@given(st.data(), texts, stops, st.sampled_from(TOKENIZERS))
def test_all_that_is_shown_is_the_decoded_text_up_to_the_first_stop_string(
    data: st.DataObject, text: str, stop: tuple[str, ...], tokenizer: SmallTokenizer
) -> None:
    tokens = data.draw(splits(text, tokenizer))
    assert "".join(stream(tokens, tokenizer, stop)) == cut_at_first_stop(tokenizer.decode(tokens), stop)


@given(st.lists(st.integers(0, BYTE_LEVEL.backend.get_vocab_size() - 1), max_size=30), stops, st.sampled_from(TOKENIZERS[:2]))
def test_even_random_bytes_come_out_as_the_full_decode(
    tokens: list[int], stop: tuple[str, ...], tokenizer: SmallTokenizer
) -> None:
    assert "".join(stream(tokens, tokenizer, stop)) == cut_at_first_stop(tokenizer.decode(tokens), stop)


def test_only_a_purely_byte_level_tokenizer_is_decoded_without_the_library() -> None:
    assert BYTE_LEVEL.shown_bytes is not None
    assert BY_LIBRARY.shown_bytes is None
    assert BYTE_FALLBACK.shown_bytes is None


@given(texts, st.sampled_from(TOKENIZERS))
def test_half_a_character_is_never_shown(text: str, tokenizer: SmallTokenizer) -> None:
    shown = stream(tokenizer.encode(text), tokenizer)
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""  # and nothing is left over when the last character is whole


@given(texts, stops)
def test_what_could_become_a_stop_string_is_held_back_and_nothing_else_is(text: str, stop: tuple[str, ...]) -> None:
    tokens = BYTE_LEVEL.encode(text)
    shown = ""
    watched = TextStream(BYTE_LEVEL, stop)
    for n, token in enumerate(tokens, start=1):
        shown += watched.push(token)
        if watched.stopped:
            break
        so_far = BYTE_LEVEL.decode(tokens[:n]).rstrip("\ufffd")
        held = so_far[len(shown) :]
        assert so_far.startswith(shown)
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
        assert not any(so_far.endswith(s[:k]) for s in stop for k in range(len(held) + 1, len(s)))


def test_a_stop_string_that_spans_tokens_is_found_and_never_shown() -> None:
    tokens = [*BYTE_LEVEL.encode("hello st"), *BYTE_LEVEL.encode("op and more")]
    text = TextStream(BYTE_LEVEL, ("stop",))
    shown = [text.push(t) for t in tokens]
    assert "".join(shown) == "hello "
    assert text.stopped
    assert text.finish() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    tokens = BYTE_LEVEL.encode("xabcy")
    assert "".join(stream(tokens, stop=("abcy", "bc"))) == "xa"
    assert "".join(stream(tokens, stop=("bc", "abc"))) == "x"


def test_a_beginning_of_a_stop_string_is_shown_when_the_answer_ends() -> None:
    shown = stream(BYTE_LEVEL.encode("to sto"), stop=("stop",))
    assert "".join(shown[:-1]) == "to "
    assert shown[-1] == "sto"


def test_a_stop_string_within_the_first_min_tokens_is_ordinary_text() -> None:
    tokens = BYTE_LEVEL.encode("oabxab")
    assert "".join(stream(tokens, stop=("ab",), min_tokens=3)) == "oabx"
    assert "".join(stream(tokens, stop=("ab",), min_tokens=9)) == "oabxab"


def test_a_character_cut_short_by_the_token_limit_shows_as_a_replacement_character() -> None:
    assert "".join(stream(BYTE_LEVEL.encode("a\u20ac")[:-1])) == "a\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_do_not_break_a_byte_fallback_stream(seed: int) -> None:
    rng = random.Random(seed)
    text = TextStream(BYTE_FALLBACK, ())
    for _ in range(200):
        text.push(rng.randrange(1, 257))
    text.finish()
    after = "".join(text.push(t) for t in BYTE_FALLBACK.encode("a stop")) + text.finish()
    assert after.endswith("stop")


def test_an_empty_stop_string_stops_nothing() -> None:
    assert "".join(stream(BYTE_LEVEL.encode("abc"), stop=("",))) == "abc"


@given(texts)
def test_the_characters_so_far_are_counted_whether_shown_or_held_back(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)
    seen = TextStream(BYTE_LEVEL, ("stopp",))
    for number, token in enumerate(tokens, 1):
        seen.push(token)
        if not seen.stopped:
            assert seen.chars == len(BYTE_LEVEL.decode(tokens[:number]).rstrip("\ufffd"))
