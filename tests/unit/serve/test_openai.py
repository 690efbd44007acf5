from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pydantic import ValidationError

from pdmux_ray.errors import RequestError
from pdmux_ray.serve.generation import UsageAsked
from pdmux_ray.serve.openai import INERT, UNSUPPORTED, ChatRequest, CompletionRequest, parse
from pdmux_ray.types import SamplingParams

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": HI} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def test_what_is_not_given_has_openais_defaults() -> None:
    assert completion(seed=5).sampling(16, vocab_size=100) == [SamplingParams(max_tokens=16, temperature=1.0, seed=5)]


def test_null_means_not_given() -> None:
    body = completion(seed=5, temperature=None, top_p=None, n=None, stop=None, stream=None, logprobs=None, user=None)
    assert body.sampling(16, vocab_size=100) == [SamplingParams(max_tokens=16, seed=5)]


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 2, "stop_token_ids": [4, 5], "ignore_eos": True, "logprobs": 3,
    }  # fmt: skip
    expected = fields | {"stop_token_ids": (4, 5)}
    assert fields.keys() | {"max_tokens"} == {field.name for field in dataclasses.fields(SamplingParams)}
    assert completion(**fields).sampling(9, vocab_size=100) == [SamplingParams(max_tokens=9, **expected)]


def test_top_k_minus_one_is_off() -> None:
    assert completion(top_k=-1).sampling(1, vocab_size=100)[0].top_k == 0


def test_the_choices_of_a_seeded_prompt_have_seeds_of_their_own() -> None:
    choices = completion(seed=2**63 - 1, n=3).sampling(1, 100)
    assert [choice.seed for choice in choices] == [2**63 - 1, 0, 1]
    assert choices == completion(seed=2**63 - 1, n=3).sampling(1, 100)


def test_without_a_seed_every_request_draws_one() -> None:
    assert completion().sampling(1, 100)[0].seed != completion().sampling(1, 100)[0].seed


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], 5, None, [1, "a"], [1.5], [True], {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, UsageAsked.NONE),
        ({}, UsageAsked.NONE),
        ({"include_usage": False, "continuous_usage_stats": False}, UsageAsked.NONE),
        ({"include_usage": True}, UsageAsked.LAST),
        ({"include_usage": True, "continuous_usage_stats": None}, UsageAsked.LAST),
        ({"include_usage": True, "continuous_usage_stats": True}, UsageAsked.ALL),
    ],
)
def test_usage_is_counted_as_the_stream_options_ask(options: Any, asked: UsageAsked) -> None:
    assert completion(stream_options=options).usage_asked is asked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"more": 1}}, "stream_options.more"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),  # there is no usage to be continuous
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert refused.value.param == param
    assert param in str(refused.value)


@pytest.mark.parametrize(
    "fields", [{"temperature": 2.1}, {"top_p": 0}, {"min_tokens": 99}, {"seed": -1}, {"presence_penalty": 3}, {"top_k": -2}]
)
def test_a_sampling_value_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**fields).sampling(16, 100)
    assert refused.value.param == next(iter(fields))


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="100"):
        completion(stop_token_ids=[100]).sampling(16, vocab_size=100)


@pytest.mark.parametrize("name", sorted(INERT))
def test_a_field_that_changes_nothing_is_dropped(name: str) -> None:
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_by_name_unless_it_is_off(name: str) -> None:
    for off in UNSUPPORTED[name]:
        assert chat(**{name: off}) == chat()
    with pytest.raises(RequestError, match="not supported") as refused:
        chat(**{name: {"some": "thing"}})
    assert refused.value.param == name


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="Unrecognized request argument: temprature"):
        chat(temprature=0.1)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"model": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError):
        parse(ChatRequest, raw)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_developer_is_another_word_for_system() -> None:
    message = chat(messages=[{"role": "developer", "content": "be brief"}]).messages[0]
    assert message.as_template_input() == {"role": "system", "content": "be brief"}


def test_an_answer_may_be_sent_back_with_its_empty_fields() -> None:
    answer = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    assert len(chat(messages=[*HI, answer]).messages) == 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        (HI * 4097, "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0]"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(messages=messages)
    assert refused.value.param == param


def test_chat_logprobs_are_two_fields() -> None:
    assert chat().top_logprobs_asked is None
    assert chat(logprobs=True).top_logprobs_asked == 0
    assert chat(logprobs=True, top_logprobs=4).top_logprobs_asked == 4
    with pytest.raises(RequestError, match="needs logprobs"):
        _ = chat(top_logprobs=4).top_logprobs_asked


def test_max_completion_tokens_is_the_newer_name_of_max_tokens() -> None:
    assert chat(max_completion_tokens=7).max_tokens_asked == 7
    assert chat(max_tokens=7).max_tokens_asked == 7
    with pytest.raises(RequestError, match="contradict"):
        _ = chat(max_tokens=7, max_completion_tokens=8).max_tokens_asked


def test_the_choices_share_their_stop_tokens_each_of_which_counts_once() -> None:
    one, two = completion(stop_token_ids=[7, 5, 7], n=2).sampling(1, 100)
    assert one.stop_token_ids == (7, 5)
    assert one.stop_token_ids is two.stop_token_ids


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [5] * 100}),
        (ChatRequest, {"messages": HI, "stop_token_ids": ["x"] * 100}),
        (ChatRequest, {"messages": HI, "stop": [5] * 100}),
        (ChatRequest, {"messages": HI, "stream_options": {str(key): 1 for key in range(100)}}),
        (CompletionRequest, {"prompt": [[1.5] * 100] * 100}),
    ],
)
def test_of_many_wrong_items_only_the_first_is_looked_at(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "m"} | fields)
    assert refused.value.error_count() == 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"a": "\xff"}', "the byte at position 7 is not part of a character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "m", "messages": [5]}', r"^messages\[0\]: must be a JSON object$"),
        (b'{"model": "m", "messages": [{"role": "user", "content": ""}], "stream_options": 5}', "must be a JSON object"),
    ],
)
def test_an_error_has_this_projects_own_words(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse(ChatRequest, raw)
