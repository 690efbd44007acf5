"""What gateway and instance say to each other: plain tuples, because they are packed and unpacked on every step.

message   `(load, events)`
load      the fields of `types.Load`, in order
event     `(request_id, token)` in the common case, else `(request_id, token, logprobs, finish, error, cached_tokens)` as in
          `types.TokenEvent`, where logprobs is `(logprob, ((token id, logprob), ...))` and finish a `FinishReason` value
refusal   `(class name, message, attributes)` of the error
reply     to a submit: `(refusal or None, load)`
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, TypeAlias

from pdmux_ray.errors import ContextLengthError, InstanceUnavailableError, PdmuxError, QueueFullError, RequestError
from pdmux_ray.types import Load, TokenEvent

Event: TypeAlias = tuple[Any, ...]
Message: TypeAlias = tuple[tuple[Any, ...], list[Event]]
Refusal: TypeAlias = tuple[str, str, dict[str, Any]]
Reply: TypeAlias = tuple[Refusal | None, tuple[Any, ...]]

_REFUSALS: dict[str, type[PdmuxError]] = {
    kind.__name__: kind for kind in (RequestError, ContextLengthError, QueueFullError, InstanceUnavailableError)
}


def pack_event(event: TokenEvent) -> Event:
    logprobs = event.logprobs
    if logprobs is None and event.finish is None and event.cached_tokens is None:
        return (event.request_id, event.token)
    return (
        event.request_id,
        event.token,
        (logprobs.logprob, logprobs.top) if logprobs is not None else None,
        event.finish.value if event.finish is not None else None,
        event.error,
        event.cached_tokens,
    )


def pack_load(load: Load) -> tuple[Any, ...]:
    return astuple(load)


def unpack_load(load: tuple[Any, ...]) -> Load:
    return Load(*load)


def pack_refusal(error: PdmuxError) -> Refusal:
    """Errors travel as data: an exception with a constructor of its own does not survive pickling."""
    return (type(error).__name__, str(error), dict(vars(error)))


def unpack_refusal(refusal: Refusal) -> PdmuxError:
    """The error that `pack_refusal` was given; one of a class that no client should see becomes a plain PdmuxError."""
    name, message, attributes = refusal
    kind = _REFUSALS.get(name, PdmuxError)
    error = kind.__new__(kind, message)  # not __init__, which builds the message from numbers that stayed behind
    error.__dict__.update(attributes)
    return error
