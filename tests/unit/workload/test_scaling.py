"""Scaling: what is divided, floored and capped, and that shared prefixes stay shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.outline import Outline, reusable_fraction
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.traces import read_mooncake

SAMPLE = Path(__file__).parents[3] / "configs" / "traces" / "mooncake_conversation_sample.jsonl"


def scaled(scaling: Scaling, outline: Outline) -> Outline:
    return scaling.capped(scaling.divided(outline))


def test_without_rules_nothing_changes_and_nothing_is_said() -> None:
    outline = Outline(1030, 52, (1, 2, 3), trace_s=4.0)
    assert scaled(Scaling(), outline) == outline
    assert Scaling().rules == []


def test_lengths_and_blocks_are_divided_alike() -> None:
    small = scaled(Scaling(divide=16), Outline(1030, 52, (1, 2, 3), trace_s=4.0))
    assert small == Outline(65, 4, (1, 2, 3), trace_s=4.0, block_tokens=32)
    assert small.block_lengths() == [32, 32, 1]


@pytest.mark.parametrize("divide", [2, 7, 16, 31.5, 100, 512])
def test_every_shared_block_stays_shared_whatever_divides_it(divide: float) -> None:
    requests = list(read_mooncake(SAMPLE).requests)
    small = [scaled(Scaling(divide=divide), request) for request in requests]
    assert [outline.blocks for outline in small] == [outline.blocks for outline in requests]
    assert all(sum(o.block_lengths()) == o.prompt_tokens and min(o.block_lengths()) >= 1 for o in small)
    full = {(tuple(o.block_lengths()[:-1]), len(o.blocks)) for o in small}
    assert len({count for _, count in full}) == len(full)  # the lengths of full blocks depend on their places alone


def test_short_requests_are_floored() -> None:
    scaling = Scaling(divide=16, min_prompt_tokens=8, min_output_tokens=4)
    small = scaled(scaling, Outline(20, 5, (1,)))
    assert (small.prompt_tokens, small.output_tokens, small.block_lengths()) == (8, 4, [8])


def test_a_request_that_does_not_fit_is_shortened_in_proportion() -> None:
    capped = scaled(Scaling(max_context=1000), Outline(3000, 1000, (1, 2, 3, 4, 5, 6)))
    assert (capped.prompt_tokens, capped.output_tokens) == (750, 250)


def test_a_shortened_prompt_keeps_its_beginning_and_its_last_block() -> None:
    capped = scaled(Scaling(max_context=1100), Outline(3000, 10, (1, 2, 3, 4, 5, 6)))
    assert capped.blocks == (1, 2, 6)
    assert capped.block_lengths() == [512, 512, capped.prompt_tokens - 1024]


def test_a_request_that_fits_is_the_same_object() -> None:
    outline = Outline(900, 100, (1, 2))
    assert Scaling(max_context=1000).capped(outline) is outline


@pytest.mark.parametrize(("prompt", "output"), [(100_000, 1), (1, 100_000), (50_000, 50_000)])
def test_the_cap_leaves_both_at_least_their_floor(prompt: int, output: int) -> None:
    scaling = Scaling(max_context=64, min_prompt_tokens=8, min_output_tokens=4)
    capped = scaled(scaling, Outline(prompt, output, tuple(range(-(-prompt // 512)))))
    assert capped.prompt_tokens + capped.output_tokens == 64
    assert capped.prompt_tokens >= 8
    assert capped.output_tokens >= 4


def test_prefixes_are_shared_after_the_cap_too_and_no_two_requests_become_one() -> None:
    small = [scaled(Scaling(divide=16, max_context=256), request) for request in read_mooncake(SAMPLE).requests]
    assert max(outline.prompt_tokens + outline.output_tokens for outline in small) == 256
    assert reusable_fraction(small) > 0.2
    capped = [outline.blocks for outline in small if outline.prompt_tokens + outline.output_tokens == 256]
    assert len({blocks[0] for blocks in capped}) == 1  # the system prompt that all of them share
    assert len(set(capped)) > 0.98 * len(capped)


def test_every_rule_is_said() -> None:
    rules = Scaling(divide=16, max_context=2048, min_prompt_tokens=8).rules
    assert [words in rule for words, rule in zip(("divided by 16", "at least 8", "more than 2048"), rules, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"divide": 0.5}, "divided by 1 to 512"),
        ({"divide": 513}, "divided by 1 to 512"),
        ({"divide": float("nan")}, "divided by 1 to 512"),
        ({"min_output_tokens": 0}, "least length"),
        ({"max_context": 1}, "cannot hold the least request, 2 tokens"),
    ],
)
def test_rules_that_cannot_hold_are_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Scaling(**arguments)  # type: ignore[arg-type]
