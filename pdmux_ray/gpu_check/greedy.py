"""Greedy answers of a small random model in every mode, by the whole engine: each token is the float32 reference's best one.

In bfloat16 a batch's shape moves a logit by about a hundredth of their spread, so two modes may part where two tokens are
that close, and then go on from different ones. So each mode is compared with the reference's logits after the same tokens.
Where the reference's best token leads by more than `BEHIND`, every mode must choose it, and so all modes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdmux_ray.engine.engine import Engine
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.models import ModelShape
from pdmux_ray.gpu_check.report import NONE, Limit, Row
from pdmux_ray.gpu_check.settings import Multiplex
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder, load_decoder
from pdmux_ray.model.ops import AttentionBatch
from pdmux_ray.model.reference_ops import Packed, ReferenceOps
from pdmux_ray.policy.fake_costs import FakeCosts
from pdmux_ray.types import Mode, NewRequest, SamplingParams, TokenEvent

BEHIND = Limit(0.1, speed=False)  # the best logit minus that of a chosen token, at worst, in standard deviations of the logits
PAGE_SIZE = 16
_STEPS_BETWEEN = 3  # steps that the first half of the requests is ahead, so that prefills meet decodes
_CHUNKS = 3  # of the longest prompt

Prompts = Sequence[tuple[int, ...]]


def greedy(lab: Lab) -> Iterator[Row]:
    shape, prompts, longest = lab.sizes.small, make_prompts(lab), max(lab.sizes.prompts)
    settings = lab.settings(lab.sizes.kv_gib[0], len(prompts), 2 * longest, Multiplex(itl_s=1.0))
    settings = replace(settings, chunk_tokens=longest // _CHUNKS)  # also what the runner rehearses: a dry run interprets it
    runner = lab.runner(shape, settings, interpreted=True)
    costs = FakeCosts(units=runner.units, layers=runner.layers)
    reference = Reference(lab, shape)
    first: list[tuple[int, ...]] = []
    for mode in Mode:
        fixed = mode is not Mode.AUTO
        multiplex = Multiplex(policy="fixed", block_layers=1) if fixed else settings.multiplex
        limits = replace(settings, mode=mode, multiplex=multiplex).limits(shape.context_length, shape.vocab_size)
        answers: dict[str, list[int]] = {}
        engine = Engine(runner, limits, partial(_take, answers), costs=None if fixed else costs)
        found = _run(engine, prompts, lab.sizes.answers, answers)
        first = first or found
        same = sum(answer == other for answer, other in zip(found, first, strict=True))
        judged = [reference.judge(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]
        note = f"{same} of {len(found)} answers as in {Mode.PREFILL_FIRST.value}"
        yield BEHIND.row(mode.value, max(one.behind for one in judged), "std", note=note)
        note = f"of {sum(one.clear for one in judged)}; {sum(map(len, found))} in all"
        yield NONE.row(f"{mode.value}: others than clear best ones", sum(one.wrong for one in judged), "tokens", note=note)


def make_prompts(lab: Lab) -> Prompts:
    """Two begin alike, so that the prefix cache has something."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(3, lab.sizes.small.vocab_size, length).tolist()) for length in lab.sizes.prompts]
    longest = max(prompts, key=len)
    return [*prompts, (*longest[: len(longest) - 1], 3)]


def _run(engine: Engine, prompts: Prompts, tokens: int, answers: dict[str, list[int]]) -> list[tuple[int, ...]]:
    """All answers; the second half of the prompts comes when the first one is at work."""
    half = (len(prompts) + 1) // 2
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        if index == half:
            for _ in range(_STEPS_BETWEEN):
                engine.step()
        engine.submit(NewRequest(str(index), prompt, params))
    while engine.step():
        pass
    engine.check_integrity()
    found = [tuple(answers.get(str(index), ())) for index in range(len(prompts))]
    if short := [index for index, answer in enumerate(found) if len(answer) < tokens]:
        raise RuntimeError(f"{len(short)} of {len(prompts)} requests failed on the device: what it said stands above")
    return found


def _take(answers: dict[str, list[int]], sink: str, events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.token is not None:
            answers.setdefault(event.request_id, []).append(event.token)


class Judged(NamedTuple):
    """An answer by the reference."""

    behind: float  # by how much its worst token misses the best logit, in standard deviations of its row
    clear: int  # tokens where the best one leads the second by more than BEHIND
    wrong: int  # of these, the ones that are not the best


class _WideOps(ReferenceOps):
    """Computes in float32 with weights that were made in another dtype."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return weight.float(), None if bias is None else bias.float()

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return super().embed(token_ids, table).float()


class Reference:
    """The same random weights as the runner's, computed with in float32."""

    def __init__(self, lab: Lab, shape: ModelShape) -> None:
        self._device, self._pages = lab.streams.device, -(-2 * max(lab.sizes.prompts) // PAGE_SIZE) + lab.sizes.answers
        directory: Path = shape.write(lab.folder / "models")
        config = DecoderConfig.from_pretrained(directory)
        pool = torch.zeros(shape.layers, 2, self._pages, shape.kv_heads, PAGE_SIZE, shape.head_dim, device=self._device)
        self._decoder: Decoder = load_decoder(directory, lab.dtype, _WideOps(pool), "dummy", config, self._device)

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judged:
        with torch.inference_mode():
            rows = self.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
            chosen = rows.gather(1, torch.tensor(answer, device=self._device)[:, None])[:, 0]
            best, spread = rows.topk(2), rows.std(-1)
            behind = (best.values[:, 0] - chosen) / spread
            clear = (best.values[:, 0] - best.values[:, 1]) / spread > BEHIND.value
            wrong = clear & (best.indices[:, 0] != torch.tensor(answer, device=self._device))
            return Judged(float(behind.max()), int(clear.sum()), int(wrong.sum()))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), V]: after each token, in one prefill."""
        places = torch.arange(len(tokens), device=self._device)
        counts = torch.tensor([0, len(tokens)], dtype=torch.int32, device=self._device)
        table = torch.arange(self._pages, dtype=torch.int32, device=self._device)[None]
        batch = AttentionBatch(places, places.clone(), counts, counts[1:], table)
        decoder = self._decoder
        hidden = decoder.embed(torch.tensor(tokens, device=self._device))
        return decoder.logits(decoder.run_layers(0, decoder.config.layers, hidden, batch))
