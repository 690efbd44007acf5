"""From a spec to requests: content, determinism, what the description says, and how a wrong spec is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.lines import TraceError
from pdmux_ray.workload.outline import Outline
from pdmux_ray.workload.prompts import TokenContent
from pdmux_ray.workload.requests import Ask
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.source import load_workload

SAMPLES = Path(__file__).parents[3] / "configs" / "traces"
MOONCAKE = f"mooncake:{SAMPLES / 'mooncake_conversation_sample.jsonl'}"
AZURE = f"azure:{SAMPLES / 'azure_conversation_sample.csv'}"
IDS = (1000, 40_000)
SMALL = Scaling(divide=16, max_context=2048)
SPECS = ["sharegpt", "loogle", "openthoughts", "tool-agent", "fixed:600,10", MOONCAKE, AZURE]


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_arguments_make_the_same_requests_and_a_longer_run_begins_alike(spec: str) -> None:
    longer = load_workload(spec, scaling=SMALL, token_ids=IDS).asks(60, seed=4)
    assert load_workload(spec, scaling=SMALL, token_ids=IDS).asks(40, seed=4) == longer[:40]


@pytest.mark.parametrize("spec", SPECS)
def test_another_seed_or_workload_shares_no_beginning(spec: str) -> None:
    first = load_workload(spec, scaling=SMALL, token_ids=IDS)
    other = load_workload("fixed:600,10" if spec != "fixed:600,10" else "sharegpt", scaling=SMALL, token_ids=IDS)
    prompts = [ask.prompt[:3] for ask in (first.asks(1, 0)[0], first.asks(1, 1)[0], other.asks(1, 0)[0])]
    assert len(set(prompts)) == 3


@pytest.mark.parametrize("spec", SPECS)
def test_token_ids_lie_in_the_range_and_lengths_within_the_context(spec: str) -> None:
    for ask in load_workload(spec, scaling=SMALL, token_ids=(300, 500)).asks(60, seed=1):
        assert isinstance(ask.prompt, tuple)
        assert set(map(type, ask.prompt)) == {int}
        assert 300 <= min(ask.prompt) <= max(ask.prompt) < 500
        assert ask.output_tokens is not None
        assert len(ask.prompt) + ask.output_tokens <= 2048


def shared_tokens(first: Ask, second: Ask) -> int:
    return next((i for i, (a, b) in enumerate(zip(first.prompt, second.prompt, strict=False)) if a != b), len(first.prompt))


@pytest.mark.parametrize("divide", [1, 16, 100])
def test_requests_of_a_trace_share_as_many_tokens_as_their_leading_blocks_have(tmp_path: Path, divide: float) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1536, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 1, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 3]}\n'
        '{"timestamp": 2, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 3]}\n'
    )
    first, second, third = load_workload(f"mooncake:{path}", scaling=Scaling(divide=divide), token_ids=IDS).asks(3, seed=0)
    assert shared_tokens(first, second) == 1024 // divide
    assert second.prompt == third.prompt
    assert len(second.prompt) == -(-1100 // divide)


def test_prompts_that_share_nothing_differ_from_the_first_tokens_on() -> None:
    for ids, beginning in ((IDS, 4), ((0, 100), 8)):
        asks = load_workload("fixed:20,1", token_ids=ids).asks(1000, seed=2)
        assert len({ask.prompt[:beginning] for ask in asks}) == 1000


def test_a_block_has_the_same_content_wherever_it_stands_and_whatever_cuts_it() -> None:
    content = TokenContent(IDS, seed=5)
    alone, after = content.prompt(Outline(100, 1, (7,))), content.prompt(Outline(1500, 1, (3, 7, 4)))
    assert after[512:612] == alone
    assert TokenContent(IDS, seed=5).prompt(Outline(40, 1, (7,))) == alone[:40]


def test_token_ids_are_spread_over_the_whole_range() -> None:
    prompt = TokenContent((100, 200), seed=1).prompt(Outline(100_000, 1, (7,)))
    counts = [prompt.count(value) for value in range(100, 200)]
    assert min(counts) > 850
    assert max(counts) < 1150


def test_times_of_a_trace_come_with_its_requests() -> None:
    assert [ask.trace_s for ask in load_workload(MOONCAKE, token_ids=IDS, scaling=SMALL).asks(3, 0)] == [0.0, 3.001, 3.001]
    assert load_workload("sharegpt", token_ids=IDS).asks(1, 0)[0].trace_s is None


def test_the_description_says_where_it_is_from_every_rule_and_what_they_did() -> None:
    free = load_workload("loogle", scaling=Scaling(divide=16), token_ids=IDS).asks(200, seed=1)
    over = sum(len(ask.prompt) + (ask.output_tokens or 0) > 2048 for ask in free)
    workload = load_workload("loogle", scaling=SMALL, token_ids=IDS)
    assert "arXiv:2311.04939" in workload.description[0]
    workload.asks(200, seed=1)
    text = "\n".join(workload.description)
    assert "divided by 16" in text
    assert "As sent, 200 requests: prompt tokens mean" in text
    before, after = (np.mean([len(ask.prompt) for ask in asks]) for asks in (free, workload.asks(200, seed=1)))
    assert f"The cap of 2048 tokens shortened {over} of 200 requests ({over / 2:.1f}%)" in text
    assert f"mean prompt + output {before:,.0f} + 2 before, {after:,.0f} + 2 after" in text
    assert over > 0


def test_a_workload_of_a_file_is_named_without_its_folder() -> None:
    assert load_workload(AZURE, token_ids=IDS).name == "azure:azure_conversation_sample.csv"


def test_prompts_come_from_a_file_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello\\nthere", "output_tokens": 5}\n\n{"prompt": "Grüße"}\n')
    workload = load_workload(f"prompts:{path}", scaling=Scaling(max_context=100), token_ids=IDS)
    assert workload.asks(2, seed=0) == [Ask("Hello\nthere", 5), Ask("Grüße", None)]
    assert "decides the length of the output for 1 of 2" in workload.description[1]
    assert "cap" in workload.description[2].lower()
    with pytest.raises(ConfigError, match="has 2 prompts: ask for no more, not for 3"):
        workload.asks(3, seed=0)


def test_prompts_come_from_a_file_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("What is Ray?\n{not json}\n")
    assert load_workload(f"prompts:{path}", token_ids=IDS).asks(2, 0) == [Ask("What is Ray?", None), Ask("{not json}", None)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ('"text"', "must be a JSON object"),
        ('{"prompt": "a", "max_tokens": 5}', "and nothing else"),
        ('{"prompt": ""}', '"prompt" must be a text'),
        ('{"prompt": [1, 2]}', '"prompt" must be a text'),
        ('{"prompt": "a", "output_tokens": 0}', '"output_tokens" must be an integer'),
        ('{"prompt": "a", "output_tokens": true}', '"output_tokens" must be an integer'),
    ],
)
def test_a_wrong_prompt_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(TraceError, match=f"prompts.jsonl, line 2: .*{words}"):
        load_workload(f"prompts:{path}", token_ids=IDS)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sharegtp", "There is no workload 'sharegtp'. Use one of sharegpt, loogle, openthoughts, tool-agent, mooncake:FILE"),
        ("sharegpt:x", "There is no workload"),
        ("mooncake:", "There is no workload"),
        ("mooncake", "There is no workload"),
        ("fixed:", "like fixed:512,64"),
        ("fixed:512", "like fixed:512,64"),
        ("fixed:512,-1", "like fixed:512,64"),
        ("fixed:0,5", "are 1 to 16777216 tokens"),
    ],
)
def test_a_wrong_spec_says_what_there_is(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_workload(spec, token_ids=IDS)


def test_texts_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Texts cannot be divided"):
        load_workload(f"prompts:{tmp_path}", scaling=Scaling(divide=2), token_ids=IDS)


def test_too_few_token_ids_no_requests_and_a_negative_seed_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 100 token ids"):
        load_workload("sharegpt", token_ids=(5, 50))
    workload = load_workload("sharegpt", token_ids=IDS)
    with pytest.raises(ConfigError, match="at least one request"):
        workload.asks(0, seed=0)
    with pytest.raises(ConfigError, match="A seed is 0 or more"):
        workload.asks(1, seed=-1)
