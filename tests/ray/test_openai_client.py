"""The official client, unmodified."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.ray.conftest import CONTEXT, App

pytestmark = pytest.mark.ray

HI: Any = [{"role": "user", "content": "Say something."}]


def test_the_model_is_listed_and_found(app: App) -> None:
    client = app.openai()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "pdmux-ray"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_answer_has_text_reason_and_usage(app: App) -> None:
    answer = app.openai().chat.completions.create(model="demo", messages=HI, max_tokens=7)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_chat_stream_adds_up_to_the_answer_with_the_same_seed(app: App) -> None:
    client = app.openai()
    arguments: Any = {"model": "demo", "messages": HI, "max_tokens": 20, "seed": 11}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_every_chunk_of_a_stream_counts_its_tokens_when_that_is_asked_for(app: App) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = app.openai().chat.completions.create(
        model="demo", messages=HI, max_tokens=20, seed=11, stream=True, stream_options=options
    )
    *chunks, last = [chunk.usage for chunk in stream]
    assert last is not None
    counted = [chunk.completion_tokens for chunk in chunks if chunk is not None]
    assert len(counted) == len(chunks)
    assert counted == sorted(counted)
    assert (counted[0], counted[-1], last.completion_tokens) == (0, 20, 20)
    assert {chunk.prompt_tokens for chunk in chunks if chunk is not None} == {last.prompt_tokens}


def test_a_stream_without_include_usage_has_none(app: App) -> None:
    stream = app.openai().completions.create(model="demo", prompt="x", max_tokens=3, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_the_first_token_does_not_wait_for_the_last(app: App) -> None:
    stream = app.openai().completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
    next(iter(stream))
    assert app.metric("pdmux_open_requests") == 1
    assert len(list(stream)) > 10


def test_text_and_its_token_ids_are_the_same_prompt(app: App) -> None:
    from pdmux_ray.model.source import resolve
    from pdmux_ray.text.tokenizer import Tokenizer

    ids = Tokenizer.load(resolve("demo")).encode("Once upon a time")
    client = app.openai()
    text = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, seed=3)
    tokens = client.completions.create(model="demo", prompt=ids, max_tokens=8, seed=3)
    assert text.choices[0].text == tokens.choices[0].text


def test_lists_of_prompts_and_n_give_every_choice_in_order(app: App) -> None:
    client = app.openai()
    both = client.completions.create(model="demo", prompt=["one", "two two"], n=2, max_tokens=5, seed=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) == 4
    second = client.completions.create(model="demo", prompt="two two", n=2, max_tokens=5, seed=3)
    assert [choice.text for choice in second.choices] == [choice.text for choice in both.choices[2:]]
    assert both.usage is not None
    assert second.usage is not None
    assert both.usage.completion_tokens == 20
    assert both.usage.prompt_tokens == second.usage.prompt_tokens + 1  # a prompt counts once, however many choices it has


def test_a_stream_of_several_choices_can_be_told_apart(app: App) -> None:
    client = app.openai()
    whole = client.completions.create(model="demo", prompt=["one", "two"], max_tokens=9, seed=3)
    texts = ["", ""]
    for chunk in client.completions.create(model="demo", prompt=["one", "two"], max_tokens=9, seed=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_never_shown(app: App, stream: bool) -> None:
    client = app.openai()
    arguments: Any = {"model": "demo", "prompt": "Tell me", "max_tokens": 40, "seed": 5}
    full = client.completions.create(**arguments).choices[0].text
    middle = len(full) // 2
    stop = full[middle : middle + 4]
    if stream:
        chunks = list(client.completions.create(**arguments, stop=stop, stream=True, stream_options={"include_usage": True}))
        text, usage = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage
        reason = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    else:
        answer = client.completions.create(**arguments, stop=[stop, "not in it"])
        text, usage, reason = answer.choices[0].text, answer.usage, answer.choices[0].finish_reason
    assert text == full[: full.index(stop)]
    assert reason == "stop"
    assert usage is not None
    assert 0 < usage.completion_tokens < 40


def test_chat_logprobs(app: App) -> None:
    answer = app.openai().chat.completions.create(model="demo", messages=HI, max_tokens=6, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert bytes(b for entry in logprobs.content for b in entry.bytes or []).decode(errors="replace")
    assert all(len(entry.top_logprobs) == 2 and math.isfinite(entry.logprob) for entry in logprobs.content)


def test_streamed_logprobs_are_those_of_the_whole_answer(app: App) -> None:
    client = app.openai()
    arguments: Any = {"model": "demo", "messages": HI, "max_tokens": 15, "seed": 8, "logprobs": True}
    whole = client.chat.completions.create(**arguments).choices[0].logprobs
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**arguments, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole is not None
    assert [entry.token for entry in whole.content or []] == streamed
    assert len(streamed) == 15


def test_completion_logprobs(app: App) -> None:
    logprobs = app.openai().completions.create(model="demo", prompt="x", max_tokens=4, logprobs=3).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 4
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_sampling_fields_beyond_openais_pass_through_extra_body(app: App) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [1]}
    answer = app.openai().completions.create(model="demo", prompt="x", max_tokens=5, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 3


def test_a_chat_answer_is_as_long_as_the_context_allows(app: App) -> None:
    long = [{"role": "user", "content": "word " * (CONTEXT - 80)}]
    answer = app.openai().chat.completions.create(model="demo", messages=long, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_errors_are_the_clients_own_exceptions(app: App) -> None:
    client = app.openai()
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt="x", temperature=9)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
