"""The four shapes have the statistics that their sources publish; docs/workloads.md says which those are."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import numpy as np
import pytest

from pdmux_ray.workload.lengths import PowerLaw, Quantiles
from pdmux_ray.workload.outline import BLOCK_TOKENS, Outline, reusable_fraction
from pdmux_ray.workload.shapes import LOOGLE, OPENTHOUGHTS, SHAPES, SHAREGPT, TOOL_AGENT, Shape, fixed


@cache
def many(name: str, seed: int = 0) -> list[Outline]:
    return SHAPES[name].outlines(8_000, seed)


def prompts(outlines: list[Outline]) -> list[int]:
    return [outline.prompt_tokens for outline in outlines]


def outputs(outlines: list[Outline]) -> list[int]:
    return [outline.output_tokens for outline in outlines]


@pytest.mark.parametrize(
    ("shape", "prompt_mean", "output_mean", "tolerance"),
    # LooGLE's questions add 24.5 tokens.
    [(SHAREGPT, 217, 202, 0.03), (LOOGLE, 24_024, 15, 0.03), (OPENTHOUGHTS, 709, 8_374, 0.03), (TOOL_AGENT, 8_596, 182, 0.03)],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_mean_lengths_are_the_published_ones(shape: Shape, prompt_mean: float, output_mean: float, tolerance: float) -> None:
    outlines = many(shape.name)
    assert np.mean(prompts(outlines)) == pytest.approx(prompt_mean, rel=tolerance)
    assert np.mean(outputs(outlines)) == pytest.approx(output_mean, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_run_has_about_the_published_mean_too(seed: int) -> None:
    """Independent draws would be off by a tenth in four runs of ten."""
    assert np.mean(prompts(SHAREGPT.outlines(100, seed))) == pytest.approx(217, rel=0.06)


def test_lengths_come_in_random_order() -> None:
    lengths = prompts(OPENTHOUGHTS.outlines(2000, seed=3))
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(lengths, outputs(OPENTHOUGHTS.outlines(2000, seed=3)))[0, 1]) < 0.1


def test_the_tails_of_tool_agent_are_those_of_the_released_trace() -> None:
    outlines = many(TOOL_AGENT.name)
    assert np.percentile(prompts(outlines), [50, 99]) == pytest.approx([6_346, 61_525], rel=0.05)
    assert np.median(outputs(outlines)) == pytest.approx(30, abs=2)


@pytest.mark.parametrize(
    ("shape", "prompt_range", "output_range"),
    [
        (SHAREGPT, (4, 1_024), (4, 1_838)),
        (LOOGLE, (3_390, 81_039), (2, 326)),
        (OPENTHOUGHTS, (311, 4_633), (684, 32_768)),
        (TOOL_AGENT, (891, 126_195), (1, 2_000)),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_no_length_is_beyond_the_published_least_and_most(
    shape: Shape, prompt_range: tuple[int, int], output_range: tuple[int, int]
) -> None:
    outlines = many(shape.name)
    for lengths, (least, most) in ((prompts(outlines), prompt_range), (outputs(outlines), output_range)):
        assert least <= min(lengths) <= max(lengths) <= most


def test_sharegpt_keeps_the_limit_of_prompt_and_answer_together() -> None:
    assert max(o.prompt_tokens + o.output_tokens for o in many(SHAREGPT.name)) <= 2048


@pytest.mark.parametrize("seed", range(3))
def test_59_percent_of_the_blocks_of_tool_agent_are_reusable(seed: int) -> None:
    assert reusable_fraction(many(TOOL_AGENT.name, seed)) == pytest.approx(0.59, abs=0.02)


def test_requests_of_tool_agent_begin_with_one_of_three_system_prompts() -> None:
    first_blocks = Counter(outline.blocks[0] for outline in many(TOOL_AGENT.name))
    shares = sorted((count / 8000 for count in first_blocks.values()), reverse=True)
    assert sum(shares[:3]) > 0.99
    assert shares[2] > 0.1


def test_questions_about_a_document_share_it_up_to_the_last_block() -> None:
    outlines = many(LOOGLE.name)[:6448]
    documents: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for outline in outlines:
        documents[outline.blocks[0]].append(outline.blocks)
    assert len(documents) == pytest.approx(776, rel=0.01)
    for questions in documents.values():
        common = next((i for i, ids in enumerate(zip(*questions, strict=False)) if len(set(ids)) > 1), 0)
        assert all(common >= len(blocks) - 2 for blocks in questions if len(questions) > 1)  # 2: a question over a boundary
    assert reusable_fraction(outlines) == pytest.approx(0.86, abs=0.02)


@pytest.mark.parametrize("shape", [SHAREGPT, OPENTHOUGHTS, fixed(600, 10)], ids=lambda shape: shape.name)
def test_what_shares_nothing_has_no_block_twice(shape: Shape) -> None:
    assert reusable_fraction(shape.outlines(500, seed=1)) == 0


@pytest.mark.parametrize("shape", [*SHAPES.values(), fixed(600, 10)], ids=lambda shape: shape.name)
def test_the_first_requests_do_not_depend_on_how_many_follow(shape: Shape) -> None:
    assert shape.outlines(400, seed=9)[:150] == shape.outlines(150, seed=9)
    assert shape.outlines(150, seed=9) != shape.outlines(150, seed=10) or shape.name.startswith("fixed")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_every_prompt_has_the_blocks_that_hold_it_and_a_last_one_of_its_own(shape: Shape) -> None:
    outlines = many(shape.name)[:2000]
    lasts = [outline.blocks[-1] for outline in outlines]
    assert len(set(lasts)) == len(lasts)
    assert all(len(o.blocks) == -(-o.prompt_tokens // BLOCK_TOKENS) for o in outlines)


@pytest.mark.parametrize("mean", [12.0, 40.0, 184.0, 400.0, 900.0])
def test_a_power_law_has_the_mean_it_was_given(mean: float) -> None:
    uniform = (np.arange(100_000) + 0.5) / 100_000
    lengths = PowerLaw(4, mean, 1024).at(uniform)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert (lengths.min(), lengths.max()) == (4, 1024) or mean in (12.0, 900.0)


def test_quantiles_are_met_and_their_mean_is_that_of_the_lengths() -> None:
    known = Quantiles({0: 10, 0.5: 100, 0.9: 1000, 1: 5000})
    uniform = (np.arange(100_000) + 0.5) / 100_000
    lengths = known.at(uniform)
    assert np.percentile(lengths, [50, 90]) == pytest.approx([100, 1000], abs=1)
    assert lengths.mean() == pytest.approx(known.mean, rel=0.005)
