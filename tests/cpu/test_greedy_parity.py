"""64 greedy tokens of the demo model through the engine against transformers, in float32, by every path through the engine.

The reference is teacher-forced: one forward pass over prompt + our tokens. Our continuation is the reference's greedy one
exactly when every token is the reference's argmax at its place. At the first that is not, the reference's own top-2 margin
decides: under 1e-3 it is a tie in float32 and counts as tolerated (what follows is a different text and is not compared).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.runner import CpuRunner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.model.decoder import Decoder
from pdmux_ray.model.ops import AttentionBatch
from pdmux_ray.types import Mode, ModelFacts, NewRequest, SamplingParams, TokenEvent

pytestmark = pytest.mark.cpu

PROMPTS = 20
TOKENS = 64
TIE = 1e-3
TOLERATED_PROMPTS = 1

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def prompts(demo_dir: Path) -> list[Ids]:
    """Ordinary text of 9 to 400 tokens; some share a prefix."""
    from pdmux_ray.text.tokenizer import Tokenizer

    tokenizer, rng = Tokenizer.load(demo_dir), random.Random(0)
    words = tokenizer.encode(Path(__file__).read_text(encoding="utf-8") + (Path(__file__).parents[2] / "LICENSE").read_text())
    shared = tuple(words[:50])
    cut = [tuple(words[at : at + rng.randint(9, 350)]) for at in rng.sample(range(len(words) - 400), PROMPTS)]
    return [shared + ids if i % 3 == 0 else ids for i, ids in enumerate(cut)]


@pytest.fixture(scope="module")
def reference(demo_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32, attn_implementation="eager").eval()


class InBlocks:
    """A decoder whose layers run `block` at a time."""

    def __init__(self, decoder: Decoder, block: int) -> None:
        self._decoder, self._block = decoder, block
        self.config, self.embed, self.logits = decoder.config, decoder.embed, decoder.logits

    def run_layers(self, start: int, end: int, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        for first in range(start, end, self._block):
            hidden = self._decoder.run_layers(first, min(first + self._block, end), hidden, batch)
        return hidden


@dataclass(frozen=True)
class Way:
    """One way through the engine."""

    together: int = 5  # prompts at once
    times: int = 1  # runs on the same engine; the last one counts
    layer_block: int | None = None
    some: int = PROMPTS  # how many of the prompts
    preempts: bool = False
    engine: dict[str, object] = field(default_factory=dict)


def generate(demo_dir: Path, prompts: Sequence[Ids], path: Way) -> list[Ids]:
    """Greedy tokens for each prompt, in the prompts' order."""
    settings = EngineConfig.model_validate({"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.5, **path.engine})
    runner = build_runner(demo_dir, settings)
    if path.layer_block is not None:
        assert isinstance(runner, CpuRunner)
        assert runner._decode is not None
        runner._decode._decoder = InBlocks(runner._decode._decoder, path.layer_block)  # type: ignore[assignment]
    tokens: dict[str, list[int]] = {}
    finished: set[str] = set()

    def publish(_sink: str, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.error is None, event.error
            if event.token is not None:
                tokens[event.request_id].append(event.token)
            if event.finish is not None:
                finished.add(event.request_id)

    limits = resolve_limits(settings, ModelFacts(2048, 49152, frozenset({2})))
    engine = Engine(runner, limits, publish)
    for run in range(path.times):
        for first in range(0, len(prompts), path.together):
            for i, prompt in enumerate(prompts[first : first + path.together], first):
                tokens[f"{run}-{i}"] = []
                params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
                engine.submit(NewRequest(f"{run}-{i}", prompt, params))
            while engine.step():
                pass
    engine.check_integrity()
    assert (engine.counters.preemptions > 0) is path.preempts
    assert (engine.counters.prefix_hit_tokens > 0) is limits.prefix_cache
    engine.close()
    assert len(finished) == path.times * len(prompts)
    return [tuple(tokens[f"{path.times - 1}-{i}"]) for i in range(len(prompts))]


def divergences(reference: torch.nn.Module, prompts: Sequence[Ids], outputs: Sequence[Ids]) -> list[str]:
    """One line per prompt whose continuation is not the reference's; raises AssertionError where that is no tie."""
    found = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert len(output) == TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        wrong = (logits.argmax(-1) != torch.tensor(output)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            top = logits[at].topk(2).values
            margin = float(top[0] - top[1])
            found.append(f"prompt {i}, token {at}: the reference's own margin is {margin:.1e}")
            assert margin < TIE, found[-1]
    return found


@pytest.fixture(scope="module")
def plain(demo_dir: Path, prompts: list[Ids]) -> list[Ids]:
    return generate(demo_dir, prompts, Way(together=1, engine={"prefix_cache": False}))


def check(reference: torch.nn.Module, prompts: Sequence[Ids], outputs: Sequence[Ids]) -> None:
    found = divergences(reference, prompts, outputs)
    print(f"\n{len(found)} of {len(prompts)} prompts diverge at a tie", *found, sep="\n  ")
    assert len(found) <= TOLERATED_PROMPTS


def test_greedy_tokens_are_those_of_transformers(reference: torch.nn.Module, prompts: list[Ids], plain: list[Ids]) -> None:
    check(reference, prompts, plain)


NO_CACHE: dict[str, object] = {"prefix_cache": False}
CHUNKED: dict[str, object] = {"mode": Mode.CHUNKED, "prefix_cache": False}
PATHS = {
    "prefix-cached": Way(times=2),
    "batched with all others": Way(together=PROMPTS, engine=NO_CACHE),
    "chunked by 1": Way(together=1, some=2, engine={**CHUNKED, "chunk_tokens": 1}),
    "chunked by 7": Way(engine={**CHUNKED, "chunk_tokens": 7}),
    "chunked by 129, batched": Way(together=PROMPTS, engine={**CHUNKED, "chunk_tokens": 129}),
    "layer by layer": Way(layer_block=1, engine=NO_CACHE),
    "in blocks of 7 layers": Way(layer_block=7, engine=NO_CACHE),
    "preempted and resumed": Way(together=PROMPTS, preempts=True, engine={**NO_CACHE, "kv_cache_gib": 0.1}),
    "preempted and resumed from cached pages": Way(
        together=PROMPTS, preempts=True, engine={"mode": Mode.CHUNKED, "chunk_tokens": 64, "kv_cache_gib": 0.1}
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_same_tokens_come_out_by_every_path(
    path: str, demo_dir: Path, reference: torch.nn.Module, prompts: list[Ids], plain: list[Ids]
) -> None:
    some = prompts[: PATHS[path].some]
    outputs = generate(demo_dir, some, PATHS[path])
    different = [i for i, output in enumerate(outputs) if output != plain[i]]
    check(reference, [some[i] for i in different], [outputs[i] for i in different])
