"""One output of an HTTP request: from its engine's events to the text, log probabilities and counts that its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from pdmux_ray.serve.wire import Event
from pdmux_ray.types import FinishReason

# (token id, its log probability, ((token id, log probability) of the best, ...), where in the text it begins: several tokens
# that make up one character begin where it does)
LogprobEntry: TypeAlias = tuple[int, float, tuple[tuple[int, float], ...], int]

LOWEST_LOGPROB = -9999.0

_STOP = FinishReason.STOP.value


class UsageAsked(Enum):
    """Which events of a stream are to say how many tokens there are."""

    NONE = 0
    LAST = 1  # one more event, after all choices
    ALL = 2  # that one, and every other: of its own choice, so far


class Text(Protocol):
    """`pdmux_ray.text.stream.TextStream`, as far as it is needed here."""

    stopped: bool

    @property
    def chars(self) -> int: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Choice:
    """Owner: one HTTP request. `take` is called with the events of its engine requests, in order, until `finish` is set.

    There is more than one when an instance is lost: the next request goes on after the tokens so far.

    A token that ends the answer by itself (end of sequence, a stop token id) counts but has no text and no log probability.
    """

    __slots__ = ("_text", "cached_tokens", "finish", "first_of_prompt", "index", "logprobs", "prompt_tokens", "tokens")

    def __init__(self, index: int, text: Text, prompt_tokens: int, first_of_prompt: bool = True) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens  # of its prompt, whose other choices have them, too
        self.first_of_prompt = first_of_prompt  # its prompt and cached tokens count; the others hit what it cached
        self.tokens: list[int] = []  # ids, as they came: all that another instance needs to go on
        self.cached_tokens = 0
        self.finish: str | None = None  # set once, by the event or the stop string that ended it
        self.logprobs: list[LogprobEntry] = []  # not yet fetched by take_logprobs
        self._text = text

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)

    def take(self, event: Event) -> str:
        """The text that may be shown now. Sets `finish`."""
        if len(event) == 2:
            return self._push(event[1])
        _, token, logprobs, finish, _, cached_tokens, *_ = event
        if cached_tokens is not None and not self.tokens:  # else it is of an instance that goes on
            self.cached_tokens = cached_tokens
        shown = ""
        if token is not None and finish == _STOP:
            self.tokens.append(token)
        elif token is not None:
            if logprobs is not None:
                self.logprobs.append(_finite(token, logprobs[0], logprobs[1], self._text.chars))
            shown = self._push(token)
        if finish is not None and self.finish is None:
            shown += self._text.finish()
            self.finish = _STOP if self._text.stopped else finish
        return shown

    def take_logprobs(self) -> list[LogprobEntry]:
        entries, self.logprobs = self.logprobs, []
        return entries

    def _push(self, token: int) -> str:
        self.tokens.append(token)
        shown = self._text.push(token)
        if self._text.stopped:
            self.finish = _STOP
        return shown


def _finite(token: int, logprob: float, top: Sequence[tuple[int, float]], offset: int) -> LogprobEntry:
    """JSON has no infinity: a token that was impossible gets a very low number instead, as other servers give it."""
    return (token, max(logprob, LOWEST_LOGPROB), tuple((other, max(p, LOWEST_LOGPROB)) for other, p in top), offset)
