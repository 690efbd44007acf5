"""A request that another instance takes up after any of its tokens: the rest is what it would have been, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import limit_spinning
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.types import FinishReason, Mode, ModelFacts, NewRequest, SamplingParams, TokenLogprobs
from tests.unit.engine.world import Log

limit_spinning()
from pdmux_ray.device.cpu.runner import CpuRunner  # noqa: E402

pytestmark = pytest.mark.cpu

TOKENS = 24
LONG = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
HOT = replace(LONG, temperature=1.3, seed=7)
PENALISED = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": -0.3}
KINDS = {
    "greedy": replace(LONG, temperature=0.0, logprobs=3),
    "seeded": replace(HOT, logprobs=0),
    "filtered": replace(HOT, top_k=40, top_p=0.9, min_p=0.01),
    "penalised": replace(HOT, **PENALISED, logprobs=2),
    "penalised, greedy": replace(LONG, temperature=0.0, **PENALISED),
    "stop tokens barred at first": replace(
        HOT, ignore_eos=False, min_tokens=12, stop_token_ids=tuple(range(3, 60)), logprobs=1
    ),
}

Answer = tuple[list[int], list[TokenLogprobs | None], FinishReason | None]


class KeptRunner(CpuRunner):
    """Outlives its engines, with all that their requests left in it."""

    def close(self) -> None:
        """The fixture closes it."""


def answers(runner: CpuRunner, facts: ModelFacts, config: EngineConfig, requests: Sequence[NewRequest]) -> dict[str, Answer]:
    """Of all requests at once, on an engine of their own."""
    log = Log()
    engine = Engine(runner, resolve_limits(config, facts, runner), log)
    for new in requests:
        engine.submit(new)
    while engine.step():
        pass
    engine.check_integrity()
    engine.close()
    found: dict[str, Answer] = {}
    for new in requests:
        events = [event for event in log.events[new.request_id] if event.token is not None]
        found[new.request_id] = (
            log.tokens(new.request_id),
            [event.logprobs for event in events],
            log.finish(new.request_id),
        )
    return found


def after_each_token(new: NewRequest, tokens: Sequence[int]) -> dict[str, NewRequest]:
    """The request as another instance would get it, by the name it has there."""
    made = {f"{new.request_id} after {count}": tuple(tokens[:count]) for count in range(len(tokens))}
    return {name: replace(new, request_id=name, generated=generated) for name, generated in made.items()}


def assert_the_rest_is_the_same(
    runner: CpuRunner, facts: ModelFacts, config: EngineConfig, prompt: Sequence[int], every: int = 1
) -> None:
    """The requests as a whole have shared the runner with nobody but each other."""
    whole = [NewRequest(kind, tuple(prompt), params) for kind, params in KINDS.items()]
    expected = answers(runner, facts, config, whole)
    rests = {name: rest for new in whole for name, rest in after_each_token(new, expected[new.request_id][0]).items()}
    asked = list(rests.values())[::every]
    got = answers(runner, facts, config.model_copy(update={"prefix_cache": False}), asked)
    for rest in asked:
        tokens, logprobs, finish = expected[rest.request_id.partition(" after")[0]]
        made = len(rest.generated or ())
        assert got[rest.request_id] == (tokens[made:], logprobs[made:], finish), rest.request_id


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    model_dir: Path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    runner = KeptRunner(model_dir, settings(Mode.PREFILL_FIRST, dtype=request.param))
    yield runner
    CpuRunner.close(runner)


def settings(mode: Mode, **more: object) -> EngineConfig:
    lanes = {"multiplex": {"policy": "fixed", "block_layers": 1}} if mode is Mode.SPLIT else {}
    config = {"device": "cpu", "mode": mode, "page_size": 4, "kv_cache_gib": 0.01, "max_waiting": 4096, "max_batch": 6}
    return EngineConfig.model_validate(config | {"chunk_tokens": 9, "max_prefill_tokens": 64} | lanes | more)


@pytest.mark.parametrize("mode", [Mode.PREFILL_FIRST, Mode.CHUNKED, Mode.SPLIT])
def test_after_every_token_the_rest_is_the_same_in_every_mode(tiny: CpuRunner, mode: Mode) -> None:
    if mode is Mode.SPLIT and usable_cores() < 2:
        pytest.skip("two lanes need two cores")
    prompt = [3 + (7 * index) % (VOCAB - 3) for index in range(13)]
    facts = ModelFacts(60, VOCAB, frozenset({2}))
    assert_the_rest_is_the_same(tiny, facts, settings(mode), prompt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_goes_on_with_the_same_text(demo_dir: Path, dtype: str) -> None:
    from pdmux_ray.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(demo_dir)
    config = EngineConfig.model_validate(
        {"device": "cpu", "dtype": dtype, "kv_cache_gib": 0.25, "max_waiting": 4096, "max_batch": 16}
    )
    runner = KeptRunner(demo_dir, config)
    prompt = tokenizer.encode("The old lighthouse keeper wrote in his log every night, and what he wrote was")
    assert_the_rest_is_the_same(runner, tokenizer.facts, config, prompt, every=5)
    CpuRunner.close(runner)


def test_a_name_that_is_used_again_brings_no_penalties_of_its_first_owner(tiny: CpuRunner) -> None:
    """Not even when the second one goes on at a length that the first one was about to reach."""
    facts, config = ModelFacts(60, VOCAB, frozenset({2})), settings(Mode.PREFILL_FIRST, prefix_cache=False)
    new = NewRequest("fresh", tuple(range(20, 30)), KINDS["penalised"])
    tokens, logprobs, finish = answers(tiny, facts, config, [new])["fresh"]
    answers(tiny, facts, config, [NewRequest("r", tuple(range(40, 50)), replace(KINDS["penalised"], max_tokens=9))])
    rest = replace(new, request_id="r", generated=tuple(tokens[:9]))
    assert answers(tiny, facts, config, [rest])["r"] == (tokens[9:], logprobs[9:], finish)
