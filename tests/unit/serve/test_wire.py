from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from pdmux_ray.errors import (
    ContextLengthError,
    InstanceUnavailableError,
    IntegrityError,
    PdmuxError,
    QueueFullError,
    RequestError,
)
from pdmux_ray.serve import wire
from pdmux_ray.serve.problems import problem
from pdmux_ray.types import FinishReason, Load, NewRequest, SamplingParams, TokenEvent, TokenLogprobs


def travel(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_a_plain_token_is_two_values() -> None:
    assert travel(wire.pack_event(TokenEvent("r", 5))) == ["r", 5]


def test_everything_else_about_a_token_travels_too() -> None:
    event = TokenEvent("r", 5, TokenLogprobs(-0.5, ((5, -0.5),)), FinishReason.LENGTH, None, 32)
    packed = travel(wire.pack_event(event))
    assert packed == ["r", 5, [-0.5, [[5, -0.5]]], "length", None, 32]
    assert wire.is_last(packed)
    assert not wire.is_last(travel(wire.pack_event(TokenEvent("r", 5, cached_tokens=0))))


def test_a_load_and_a_request_arrive_as_they_left() -> None:
    load = Load(1, 2, 3, 4, 5, 0.5, 6, 7, 8, 9, 10)
    assert wire.unpack_load(travel(wire.pack_load(load))) == load
    request = NewRequest("r", (1, 2), SamplingParams(max_tokens=5, stop_token_ids=(7,), temperature=0.5, logprobs=2))
    submission = travel(wire.pack_submission([request], left_s=2.5))
    arrived = replace(request, sink="sink", deadline_s=102.5)
    assert wire.unpack_submission(submission, "sink", now_s=100.0, fetch_s=1.0) == [arrived]
    submission = travel(wire.pack_submission([replace(request, prefill_peers=("p", "q"))], left_s=2.5))
    arrived = replace(arrived, prefill_peers=("p", "q"), fetch_deadline_s=101.0)
    assert wire.unpack_submission(submission, "sink", now_s=100.0, fetch_s=1.0) == [arrived]


def test_who_changes_the_sampling_parameters_raises_the_version() -> None:
    names = {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
    }
    assert (wire.VERSION, {field.name for field in fields(SamplingParams)}) == (9, names), (
        "the fields of SamplingParams travel by name: raise wire.VERSION, say there what changed, then change this test"
    )


def test_a_prompt_travels_once_however_many_choices_it_has() -> None:
    requests = [NewRequest(f"r{i}", prompt, SamplingParams(seed=i)) for i, prompt in enumerate([(1, 2)] * 3 + [(3,)])]
    submission = travel(wire.pack_submission(requests, left_s=1.0))
    assert [prompt for prompt, _ in submission["prompts"]] == [[1, 2], [3]]
    assert wire.request_ids(submission) == ["r0", "r1", "r2", "r3"]
    assert [(r.prompt, r.params.seed) for r in wire.unpack_submission(submission, "", 0.0, 1.0)] == [
        (r.prompt, r.params.seed) for r in requests
    ]


@pytest.mark.parametrize(
    ("name", "status", "shown"),
    [
        ("DeadlineError", 504, True),
        ("InstanceUnavailableError", 503, False),
        ("IntegrityError", 500, False),
        (None, 500, False),
    ],
)
def test_an_engines_error_has_its_status_and_only_a_deadlines_words_reach_the_client(
    name: str | None, status: int, shown: bool
) -> None:
    event = TokenEvent("r", finish=FinishReason.ERROR, error="page 7 of r3", error_type=name)
    known = problem(wire.unpack_error(travel(wire.pack_event(event))[4]))
    assert known.status == status
    assert ("page 7" in str(known.body())) is shown


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("wrong", param="n"), 400),
        (ContextLengthError(100, 50), 400),
        (QueueFullError(7, 2.5), 429),
        (InstanceUnavailableError("gone"), 503),
    ],
)
def test_a_refusal_arrives_with_its_words_and_its_status(error: PdmuxError, status: int) -> None:
    arrived = wire.unpack_refusal(travel(wire.pack_refusal(error)))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
    assert problem(arrived).status == status


def test_an_error_that_no_client_should_see_by_name_arrives_as_a_plain_one() -> None:
    assert type(wire.unpack_refusal(travel(wire.pack_refusal(IntegrityError("a bug"))))) is PdmuxError


def test_a_full_queue_says_when_to_try_again_in_whole_seconds() -> None:
    assert problem(QueueFullError(7, 2.5)).headers == {"retry-after": "3"}
