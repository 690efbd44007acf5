"""One answer's text as its tokens arrive: incremental detokenization and stop strings. Knows nothing of HTTP or engines."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    import tokenizers


class TokenDecoder(Protocol):
    """What a stream needs of a tokenizer; `pdmux_ray.text.tokenizer.Tokenizer` has it."""

    @property
    def backend(self) -> tokenizers.Tokenizer: ...

    @property
    def shown_bytes(self) -> Mapping[int, bytes] | None:
        """Token id -> the bytes that it adds to the text, where a text is nothing but its tokens' bytes; else None."""

    def decode(self, token_ids: list[int]) -> str: ...


class TextStream:
    """Turns one request's generated tokens into the text that may be shown.

    Everything shown plus `finish()` is `decode(all tokens)` (special tokens left out), cut where the first stop string begins.
    Of several stop strings the one that is complete first wins, and of those the longest, so that the answer does not depend
    on how the text falls into tokens. A stop string that is complete before `min_tokens` tokens have come is ordinary text.

    One owner, no thread safety. (Where a byte-fallback tokenizer meets invalid UTF-8 its own decoding rewrites characters
    that were shown already; the stream then goes on from what it has shown.)
    """

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        shown_bytes = tokenizer.shown_bytes
        self._detokenizer = _Detokenizer(tokenizer) if shown_bytes is None else _ByteDetokenizer(shown_bytes)
        self._stop = tuple(s for s in stop if s)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""  # decoded, not shown: the longest tail that a stop string could begin with
        self.stopped = False  # a stop string is complete; nothing more will be shown

    @property
    def chars(self) -> int:
        """Whole characters so far, shown or held back."""
        return self._detokenizer.chars

    def push(self, token_id: int) -> str:
        """The text that may be shown now. "" while a character or a stop string could still be forming."""
        if self.stopped:
            return ""
        self._tokens += 1
        return self._show(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back, when no more tokens come. "" once stopped."""
        if self.stopped:
            return ""
        shown = self._show(self._detokenizer.finish())
        held, self._held = self._held, ""
        return shown + held

    def _show(self, new: str) -> str:
        if not new or not self._stop:
            return new
        text = self._held + new
        begin = _first_stop(text, len(self._held), self._stop) if self._tokens >= self._min_tokens else None
        if begin is not None:
            self.stopped, self._held = True, ""
            return text[:begin]
        keep = _forming(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _ByteDetokenizer:
    """Token ids in, whole characters out: for byte-level tokenizers, at a quarter of the library's cost per token.

    What is no UTF-8 becomes U+FFFD just as in the library, which replaces the same byte sequences.
    """

    def __init__(self, shown_bytes: Mapping[int, bytes]) -> None:
        self._shown_bytes = shown_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.chars = 0  # characters handed out

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._shown_bytes.get(token_id, b""))
        self.chars += len(text)
        return text

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self.chars += len(text)
        return text


class _Detokenizer:
    """Token ids in, whole characters out: for every tokenizer."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.chars = 0  # characters handed out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception as error:  # the library has no type of its own for it
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=True)
            return self.finish()
        self.chars += len(text)
        return text

    def finish(self) -> str:
        text = self._tokenizer.decode(self._ids)[self.chars :]
        self.chars += len(text)
        return text


def _first_stop(text: str, searched: int, stop: tuple[str, ...]) -> int | None:
    """Where the first complete stop string begins; none of them ends within text[:searched]."""
    best: tuple[int, int] | None = None  # (end, begin)
    for s in stop:
        begin = text.find(s, max(0, searched - len(s) + 1))
        if begin >= 0 and (best is None or (begin + len(s), begin) < best):
            best = (begin + len(s), begin)
    return None if best is None else best[1]


def _forming(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that is a proper beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stop)) - 1), 0, -1):
        tail = text[-length:]
        if any(len(s) > length and s.startswith(tail) for s in stop):
            return length
    return 0
