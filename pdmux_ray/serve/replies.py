"""The answers of OpenAI's completion endpoints, whole and as events. Knows nothing of HTTP, ray or the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from pdmux_ray.serve import sse
from pdmux_ray.serve.generation import Choice, LogprobEntry

NAMED_TOKENS = 16384  # whose names are kept
SLICE = 64  # tokens whose log probabilities are written without a turn for other threads: about a millisecond


class TokenNames(Protocol):
    """`pdmux_ray.text.tokenizer.Tokenizer`, as far as it is needed here."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class KeptNames:
    """Another's names, each made once: an answer with log probabilities names the same tokens over and over."""

    def __init__(self, names: TokenNames) -> None:
        self.token_text = lru_cache(NAMED_TOKENS)(names.token_text)
        self.token_bytes = lru_cache(NAMED_TOKENS)(names.token_bytes)


class Reply(Protocol):
    """How one endpoint writes its answer."""

    def opening(self, index: int) -> bytes:
        """Events before the first text of a choice."""

    def text(self, index: int, text: str) -> bytes:
        """The event for new text: once per token and client, so it is the one that has to be cheap."""

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[LogprobEntry]) -> bytes: ...

    def closing(self, index: int, text: str, entries: Sequence[LogprobEntry], finish: str) -> bytes:
        """The last event of a choice, with its last text."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after all choices, for clients that asked for it."""

    def whole(
        self,
        choices: Sequence[Choice],
        texts: Sequence[str],
        logprobs: Sequence[Sequence[LogprobEntry]],
        usage: dict[str, Any],
    ) -> bytes:
        """The answer of a request without `stream`. Any thread may write it; the others get their turns all along."""


_NO_USAGE = b"null}\n\n"


def counted(event: bytes, prompt_tokens: int, completion_tokens: int) -> bytes:
    """An event of a reply with `usage_asked`, but with these counts in the place of its null. No event stays none."""
    if not event:
        return event
    counts = (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
    return event[: -len(_NO_USAGE)] + b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts


class _Reply:
    """The frame that both endpoints share. A subclass says what a choice looks like."""

    def __init__(self, kind: str, response_id: str, model: str, created: int, usage_asked: bool, names: TokenNames) -> None:
        self._head = {"id": response_id, "object": kind, "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if usage_asked else {}
        self._names = names
        self._templates: dict[int, sse.Template] = {}  # choice index -> its text event

    def opening(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = sse.Template(self._document(self._piece(index, "\x00")))
        return template.fill(text)

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[LogprobEntry]) -> bytes:
        return sse.event(self._document(self._piece(index, text) | {"logprobs": self._logprobs(entries)}))

    def closing(self, index: int, text: str, entries: Sequence[LogprobEntry], finish: str) -> bytes:
        logprobs = self._logprobs(entries) if entries else None
        return sse.event(self._document(self._piece(index, text) | {"logprobs": logprobs, "finish_reason": finish}))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return sse.event(self._head | {"choices": [], "usage": usage})

    def whole(
        self,
        choices: Sequence[Choice],
        texts: Sequence[str],
        logprobs: Sequence[Sequence[LogprobEntry]],
        usage: dict[str, Any],
    ) -> bytes:
        answers = [self._written(*answer) for answer in zip(choices, texts, logprobs, strict=True)]
        return f'{sse.to_json(self._head)[:-1]},"choices":[{",".join(answers)}],"usage":{sse.to_json(usage)}}}'.encode()

    def _written(self, choice: Choice, text: str, entries: Sequence[LogprobEntry]) -> str:
        rest = sse.to_json(self._full(choice.index, text) | {"finish_reason": choice.finish})
        return f'{rest[:-1]},"logprobs":{self._written_logprobs(entries) if entries else "null"}}}'

    def _written_logprobs(self, entries: Sequence[LogprobEntry]) -> str:
        """`_logprobs` in slices: the encoder lets no other thread run while it is at work."""
        columns: dict[str, list[str]] = {}
        for start in range(0, len(entries), SLICE):
            for name, value in self._logprobs(entries[start : start + SLICE]).items():
                columns.setdefault(name, []).append(sse.to_json(value))
        joined = {
            name: f"[{','.join(part[1:-1] for part in parts)}]" if parts[0][0] == "[" else parts[0]
            for name, parts in columns.items()
        }
        return "{" + ",".join(f'"{name}":{value}' for name, value in joined.items()) + "}"

    def _document(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]} | self._tail

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _full(self, index: int, text: str) -> dict[str, Any]:
        """A choice of a whole answer, but for `logprobs` and `finish_reason`."""
        raise NotImplementedError

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(_Reply):
    """/v1/chat/completions"""

    def __init__(
        self, response_id: str, model: str, created: int, *, stream: bool, usage_asked: bool, names: TokenNames
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, response_id, model, created, usage_asked, names)

    def opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return sse.event(self._document({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _full(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "content": [
                self._named(token, logprob) | {"top_logprobs": [self._named(*other) for other in top]}
                for token, logprob, top, _ in entries
            ],
            "refusal": None,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._names.token_text(token), "logprob": logprob, "bytes": list(self._names.token_bytes(token))}


class CompletionReply(_Reply):
    """/v1/completions"""

    def __init__(
        self, response_id: str, model: str, created: int, *, stream: bool, usage_asked: bool, names: TokenNames
    ) -> None:
        super().__init__("text_completion", response_id, model, created, usage_asked, names)

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _full(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "tokens": [self._name(token) for token, _, _, _ in entries],
            "token_logprobs": [logprob for _, logprob, _, _ in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [offset for _, _, _, offset in entries],
        }

    def _name(self, token: int) -> str:
        """A token that is not whole characters goes by its bytes, as at OpenAI."""
        raw = self._names.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, entry: LogprobEntry) -> dict[str, float]:
        """The best and the chosen token. Of several with the same name the best counts."""
        token, logprob, top, _ = entry
        named: dict[str, float] = {}
        for other, value in (*top, (token, logprob)):
            named.setdefault(self._name(other), value)
        return named
