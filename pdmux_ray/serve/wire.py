"""How the types of the engine travel between gateway and instance: as what JSON has, because it is packed on every step.

load      the fields of `types.Load`, in order
event     `(request_id, token)` in the common case, else `(request_id, token, logprobs, finish, error, cached_tokens)` as in
          `types.TokenEvent`, where logprobs is `(logprob, ((token id, logprob), ...))` and finish a `FinishReason` value
request   the fields of `types.NewRequest` by name, without `sink` and `deadline_s`
refusal   `(class name, message, attributes)` of the error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from pdmux_ray.errors import ContextLengthError, InstanceUnavailableError, PdmuxError, QueueFullError, RequestError
from pdmux_ray.types import Load, NewRequest, SamplingParams, TokenEvent

Event: TypeAlias = Sequence[Any]
PackedLoad: TypeAlias = Sequence[Any]
Refusal: TypeAlias = Sequence[Any]

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


def is_last(event: Event) -> bool:
    """Whether this event is its request's last one."""
    return len(event) > 2 and event[3] is not None


def pack_load(load: Load) -> PackedLoad:
    return (load.running, load.waiting, load.free_pages, load.total_pages, load.steps, load.step_age_s)


def unpack_load(load: PackedLoad) -> Load:
    return Load(*load)


def pack_request(request: NewRequest) -> dict[str, Any]:
    return {"request_id": request.request_id, "prompt": request.prompt, "params": asdict(request.params)}


def unpack_request(request: Mapping[str, Any], sink: str) -> NewRequest:
    """Raises RequestError for sampling parameters out of range."""
    params = dict(request["params"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return NewRequest(request["request_id"], tuple(request["prompt"]), SamplingParams(**params), sink)


def pack_refusal(error: PdmuxError) -> Refusal:
    return (type(error).__name__, str(error), dict(vars(error)))


def unpack_refusal(refusal: Refusal) -> PdmuxError:
    """The error that `pack_refusal` was given; one of a class that no client should see becomes a plain PdmuxError."""
    name, message, attributes = refusal
    kind = _REFUSALS.get(name, PdmuxError)
    error = kind.__new__(kind, message)  # not __init__, which builds the message from numbers that stayed behind
    error.__dict__.update(attributes)
    return error
