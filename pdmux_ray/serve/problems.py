"""Every error as OpenAI writes it: a status, headers and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pdmux_ray.errors import (
    ContextLengthError,
    DeadlineError,
    InstanceUnavailableError,
    PdmuxError,
    QueueFullError,
    RequestError,
)


class UnknownModelError(RequestError):
    """The request names a model that is not served here (404)."""


class BodyTooLargeError(RequestError):
    """The request's body is larger than the limit (413)."""


class KeyRefusedError(PdmuxError):
    """No API key, or a wrong one (401)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """A message may quote what the client sent, of any length: a long one is cut in its middle."""
        param = _cut(self.param, MAX_PARAM_CHARS) if self.param is not None else None
        message = _cut(self.message, MAX_MESSAGE_CHARS)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}


MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 200

_INVALID = "invalid_request_error"


def _cut(text: str, chars: int) -> str:
    half = chars // 2
    return text if len(text) <= chars else f"{text[:half]} [...] {text[-half:]}"


def problem(error: BaseException) -> Problem:
    """An error that is meant for clients, as they see it; any other, also of this project's, is a 500 that tells nothing."""
    message = str(error)
    match error:
        case UnknownModelError():
            return Problem(404, _INVALID, message, error.param, "model_not_found")
        case BodyTooLargeError():
            return Problem(413, _INVALID, message, None, "body_too_large", {"connection": "close"})
        case QueueFullError():
            wait = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
            return Problem(429, "rate_limit_error", message, None, "queue_full", wait)
        case ContextLengthError():
            return Problem(400, _INVALID, message, error.param, "context_length_exceeded")
        case RequestError():
            return Problem(400, _INVALID, message, error.param)
        case KeyRefusedError():
            return Problem(401, "authentication_error", message, None, "invalid_api_key", {"www-authenticate": "Bearer"})
        case InstanceUnavailableError():
            return Problem(503, "server_error", message, None, "unavailable", {"retry-after": "1"})
        case DeadlineError():
            return Problem(504, "server_error", message, None, "timeout")
    return Problem(500, "server_error", "The server met an error of its own; its log has the details.")


def from_status(status: int, detail: str, headers: dict[str, str]) -> Problem:
    """For what the web framework itself refuses (no such path, wrong method)."""
    kind = _INVALID if status < 500 else "server_error"
    return Problem(status, kind, detail, None, HTTPStatus(status).name.lower(), headers)
