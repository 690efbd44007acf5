"""Offline generation: the engine, the demo model's tokenizer, and (mostly) the fake device."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdmux_ray import cli
from pdmux_ray.config import parse_app_config
from pdmux_ray.errors import RequestError
from pdmux_ray.generate import Completion, Generator
from pdmux_ray.types import FinishReason, SamplingParams

pytestmark = pytest.mark.cpu

FAKE = {"model": "demo", "engine": {"device": "fake", "fake": {"step_s": 0}, "max_batch": 2, "max_waiting": 3}}
PARAMS = SamplingParams(max_tokens=24, seed=5)
PROMPTS = [f"prompt number {i}" for i in range(20)]


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with Generator(parse_app_config(FAKE)) as fake:
        yield fake


def test_more_prompts_than_the_queue_takes_are_answered_in_their_order(generator: Generator) -> None:
    together = generator.generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in together] == [
        generator.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS
    ]
    assert {answer.finish for answer in together} == {FinishReason.LENGTH}


def test_what_is_shown_as_it_comes_is_the_text_of_the_answer(generator: Generator) -> None:
    shown: defaultdict[int, str] = defaultdict(str)

    def show(index: int, text: str) -> None:
        shown[index] += text

    answers = generator.generate(PROMPTS[:3], PARAMS, on_text=show)
    assert [shown[i] for i in range(3)] == [answer.text for answer in answers]
    assert [answer.text for answer in answers] == [generator.tokenizer.decode(answer.token_ids) for answer in answers]


def test_a_stop_string_ends_an_answer_and_frees_its_place(generator: Generator) -> None:
    free = whole(generator).text
    stop = free[len(free) // 2 :][:3]
    answer = generator.generate(PROMPTS[:1], PARAMS, stop=(stop,))[0]
    assert answer.text == free[: free.index(stop)]
    assert answer.finish is FinishReason.STOP
    assert len(answer.token_ids) < PARAMS.max_tokens
    assert whole(generator).text == free


def test_a_token_that_ends_an_answer_has_neither_text_nor_a_log_probability(generator: Generator) -> None:
    ids = whole(generator).token_ids
    end = next(i for i in range(1, len(ids)) if ids[i] not in ids[:i])
    params = replace(PARAMS, stop_token_ids=(ids[end],), logprobs=0)
    answer = generator.generate(PROMPTS[:1], params)[0]
    assert answer.token_ids == ids[: end + 1]
    assert answer.text == generator.tokenizer.decode(ids[:end])
    assert len(answer.logprobs) == end


def test_token_ids_are_a_prompt_too(generator: Generator) -> None:
    ids = generator.tokenizer.encode(PROMPTS[0])
    assert generator.generate([ids], PARAMS)[0].token_ids == whole(generator).token_ids


def test_a_refused_prompt_ends_the_call_and_the_next_one_works(generator: Generator) -> None:
    with pytest.raises(RequestError, match="empty"):
        generator.generate([PROMPTS[0], ""], PARAMS)
    assert len(whole(generator).token_ids) == PARAMS.max_tokens


def test_the_command_answers_a_chat_with_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of France?"
    assert cli.main(["generate", "--chat", "--prompt", question, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_the_command_prints_one_json_object_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--max-tokens", "4", "--temperature", "0", "--logprobs", "2", "--ignore-eos"]
    assert cli.main(["generate", "--prompt", "One, two,", "--prompt", "Red, green,", *arguments]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length", "length"]
    assert "three" in answers[0]["text"]
    assert [len(entry["top"]) for entry in answers[0]["logprobs"]] == [2] * 4


def whole(generator: Generator) -> Completion:
    return generator.generate(PROMPTS[:1], PARAMS)[0]
