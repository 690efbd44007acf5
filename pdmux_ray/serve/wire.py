"""How the types of the engine travel between gateway and instance: as what JSON has, because it is packed on every step.

load        the fields of `types.Load`, in order
event       `(request_id, token)` in the common case, else `(request_id, token, logprobs, finish, error, cached_tokens)` as in
            `types.TokenEvent`, where logprobs is `(logprob, ((token id, logprob), ...))`, finish a `FinishReason` value and
            error `(class name, message)`; with a first token `stage_s` besides
submission  `{"left_s": seconds until the deadline, "prefill": [instance ids to get the prompts' KV from, best first],
            "prompts": [[token ids, [[request_id, sampling params, generated], ...]], ...]}`: each distinct prompt once;
            generated are the tokens that another instance has made, or null. Seconds left, because the two ends' clocks have
            nothing in common.
standing    `[role, [instance ids that KV can be had from now]]`
figures     by the names of `metrics.catalog`: `Instance.figures()`
refusal     `(class name, message, attributes)` of the error
timeline    `{"now_s": the engine's clock, "units": of its device, "records": of `engine.timeline`, a page of them,
            "more": whether there are others after them, "lessons": `latency.correction.Lesson`s}`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from pdmux_ray.errors import (
    ContextLengthError,
    DeadlineError,
    InstanceUnavailableError,
    PdmuxError,
    QueueFullError,
    RequestError,
)
from pdmux_ray.types import Load, NewRequest, SamplingParams, TokenEvent

# Of everything that goes over a line, its frames (`channel`) included. Raise it with every change of meaning or shape.
# 1  one copy of the prompt per request, no deadline (never announced: its hello carries no version)
# 2  hello with a version, submissions with a deadline and each prompt once, errors with a class, counters once a second
# 3  an instance's timeline can be asked for
# 4  a load tells pages that transfers read or may write
# 5  a load tells what decodes and what is to be prefilled
# 6  an instance has a role and peers, and a submission may say from which of them to get KV; a request may go on after tokens
#    that another instance has made
# 7  a timeline's step tells what burst it is one of
# 8  the event of a first token tells where its time went; a timeline's step, how long it might wait for a block
# 9  a timeline tells what its steps have taught
VERSION = 9

Event: TypeAlias = Sequence[Any]
PackedLoad: TypeAlias = Sequence[Any]  # see `pack_load`
Submission: TypeAlias = Mapping[str, Any]
PackedStanding: TypeAlias = Sequence[Any]  # role, ids of the instances that it can get KV from
Refusal: TypeAlias = Sequence[Any]
Figures: TypeAlias = Mapping[str, float | Mapping[str, float]]
TimelinePage: TypeAlias = Mapping[str, Any]

_PARAMS = tuple(field.name for field in fields(SamplingParams))

_REFUSALS: dict[str, type[PdmuxError]] = {
    kind.__name__: kind for kind in (RequestError, ContextLengthError, QueueFullError, InstanceUnavailableError)
}


def pack_event(event: TokenEvent) -> Event:
    logprobs = event.logprobs
    if logprobs is None and event.finish is None and event.cached_tokens is None:
        return (event.request_id, event.token)
    packed = (
        event.request_id,
        event.token,
        (logprobs.logprob, logprobs.top) if logprobs is not None else None,
        event.finish.value if event.finish is not None else None,
        (event.error_type, event.error) if event.error is not None else None,
        event.cached_tokens,
    )
    return packed if event.stage_s is None else (*packed, event.stage_s)


def stages_of(event: Event) -> tuple[float, float, float] | None:
    """Of the event of a first token: `types.TokenEvent.stage_s`. None of another one."""
    return tuple(event[6]) if len(event) > 6 else None


def is_last(event: Event) -> bool:
    """Whether this event is its request's last one."""
    return len(event) > 2 and event[3] is not None


def pack_load(load: Load) -> PackedLoad:
    return tuple(load)


def unpack_load(load: PackedLoad) -> Load:
    return Load(*load)


def unpack_error(error: Sequence[Any]) -> PdmuxError:
    """Of an event. What the engine says of any other error than a deadline is for its log, not for a client."""
    name, message = error
    if name == DeadlineError.__name__:
        return DeadlineError(message)
    if name == InstanceUnavailableError.__name__:
        return InstanceUnavailableError("The instance that served this request stopped. Send it again.")
    return PdmuxError(message)


def pack_submission(requests: Sequence[NewRequest], left_s: float) -> Submission:
    """The requests of one HTTP request, which has `left_s` left for all of them. They have the same prefill peers. Their own
    deadlines and `sink` stay."""
    prompts: dict[tuple[int, ...], list[Any]] = {}
    for request in requests:
        prompts.setdefault(request.prompt, []).append(
            (request.request_id, {name: getattr(request.params, name) for name in _PARAMS}, request.generated)
        )
    return {"left_s": left_s, "prefill": list(requests[0].prefill_peers), "prompts": list(prompts.items())}


def unpack_submission(submission: Submission, sink: str, now_s: float, fetch_s: float) -> list[NewRequest]:
    """`now_s` is on the engine's clock; KV that comes from elsewhere must be there `fetch_s` later. Raises RequestError for
    sampling parameters out of range."""
    deadline_s = now_s + submission["left_s"]
    peers = tuple(submission["prefill"])
    fetch_deadline_s = now_s + fetch_s if peers else None
    requests = []
    for tokens, asks in submission["prompts"]:
        prompt = tuple(tokens)
        for request_id, packed, made in asks:
            params = SamplingParams(**packed | {"stop_token_ids": tuple(packed["stop_token_ids"])})
            generated = None if made is None else tuple(made)
            requests.append(NewRequest(request_id, prompt, params, sink, deadline_s, peers, fetch_deadline_s, generated))
    return requests


def request_ids(submission: Submission) -> list[str]:
    return [request_id for _, asks in submission["prompts"] for request_id, *_ in asks]


def pack_refusal(error: PdmuxError) -> Refusal:
    return (type(error).__name__, str(error), dict(vars(error)))


def unpack_refusal(refusal: Refusal) -> PdmuxError:
    """The error that `pack_refusal` was given; one of a class that no client should see becomes a plain PdmuxError."""
    name, message, attributes = refusal
    kind = _REFUSALS.get(name, PdmuxError)
    error = kind.__new__(kind, message)  # not __init__, which builds the message from numbers that stayed behind
    error.__dict__.update(attributes)
    return error
