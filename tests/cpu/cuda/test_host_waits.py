"""For which work of the device the host stands still, when the whole engine drives it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from recorded import recorded_runner, settings
from test_runner import prompt
from tiny_models import VOCAB, save_tiny

from pdmux_ray.bench.correctness import Answers
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.engine.timeline import Step
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.types import ModelFacts, NewRequest, SamplingParams

pytestmark = pytest.mark.cpu

BLOCKS = {"mode": "split", "multiplex": {"policy": "fixed", "block_layers": 1}}
READER = NewRequest("reader", tuple(prompt(1, 5)), SamplingParams(max_tokens=90, ignore_eos=True))
LONG = NewRequest("long", tuple(prompt(2, 40)), SamplingParams(max_tokens=1, ignore_eos=True))


STEPS_MS, PROMPT_MS = 1.0, 12.0  # as predicted: a block of a layer is as long as several steps
COSTS = FakeCosts(8, 3, fixed_s=0.0, weights_s=1e-3 * STEPS_MS, request_s=0.0, context_s=0.0, token_s=1e-3 * PROMPT_MS / 40)


@pytest.mark.parametrize("costs", [None, COSTS], ids=["single steps", "bursts"])
@pytest.mark.parametrize("seed", range(6))
def test_beside_decodes_the_host_waits_for_tokens_but_for_no_block(tmp_path: Path, seed: int, costs: FakeCosts | None) -> None:
    runner, streams = recorded_runner(save_tiny("llama", tmp_path), seed)
    limits = resolve_limits(settings(**BLOCKS), ModelFacts(128, VOCAB, frozenset({2}), prefixes_are_shareable=True), runner)
    answers = Answers()
    engine = Engine(runner, limits, answers, costs=costs)
    engine.submit(READER)
    while not answers.tokens.get("reader"):
        engine.step()
    assert prefills(streams.waited) > 0  # for those who are prefilled while nobody decodes
    before, tokens = Counter(streams.waited), len(answers.tokens["reader"])
    engine.submit(LONG)
    while "long" not in answers.ends:
        assert "reader" not in answers.ends
        engine.step()
    assert prefills(streams.waited) == prefills(before)
    assert len(answers.tokens["reader"]) >= tokens + runner.layers  # a step a block, at least
    steps = [record for record in engine.timeline.since(0) if isinstance(record, Step) and record.reason == "lanes_both"]
    assert any(step.steps > 1 for step in steps) is (costs is not None)
    assert streams.waited.total() > before.total()
    engine.close()


def prefills(waited: Counter[str]) -> int:
    return sum(count for name, count in waited.items() if name.startswith("prefill"))
