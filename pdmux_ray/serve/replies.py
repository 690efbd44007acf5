"""The answers of OpenAI's completion endpoints, whole and as events. Knows nothing of HTTP, ray or the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pdmux_ray.serve import sse
from pdmux_ray.serve.generation import Choice, LogprobEntry


class TokenNames(Protocol):
    """`pdmux_ray.text.tokenizer.Tokenizer`, as far as it is needed here."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


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
    ) -> dict[str, Any]:
        """The answer of a request without `stream`."""


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
        return sse.event(self._document(self._piece(index, text) | {"logprobs": self._logprobs(index, entries)}))

    def closing(self, index: int, text: str, entries: Sequence[LogprobEntry], finish: str) -> bytes:
        logprobs = self._logprobs(index, entries) if entries else None
        return sse.event(self._document(self._piece(index, text) | {"logprobs": logprobs, "finish_reason": finish}))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return sse.event(self._head | {"choices": [], "usage": usage})

    def whole(
        self,
        choices: Sequence[Choice],
        texts: Sequence[str],
        logprobs: Sequence[Sequence[LogprobEntry]],
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        answers = [
            self._full(choice.index, text)
            | {"logprobs": self._logprobs(choice.index, entries) if entries else None, "finish_reason": choice.finish}
            for choice, text, entries in zip(choices, texts, logprobs, strict=True)
        ]
        return self._head | {"choices": answers, "usage": usage}

    def _document(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]} | self._tail

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _full(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
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

    def _logprobs(self, index: int, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "content": [
                self._named(token, logprob) | {"top_logprobs": [self._named(*other) for other in top]}
                for token, logprob, top in entries
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
        self._offsets: dict[int, int] = {}  # choice index -> characters of token text so far

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    _full = _piece

    def _logprobs(self, index: int, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        tokens = [self._names.token_text(token) for token, _, _ in entries]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [{self._names.token_text(t): p for t, p in top} for _, _, top in entries],
            "text_offset": offsets,
        }
