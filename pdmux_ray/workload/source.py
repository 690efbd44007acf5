"""From the text on the command line to a workload.

sharegpt | loogle | openthoughts | tool-agent     drawn from published statistics (`shapes`)
mooncake:FILE | azure:FILE                         a trace (`traces`)
prompts:FILE                                       texts (`prompts`)
fixed:IN,OUT                                       lengths in tokens
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.lines import Limits
from pdmux_ray.workload.outline import Outline, OutlineSource, reusable_fraction
from pdmux_ray.workload.prompts import LazyAsks, PromptFile, TokenContent, read_prompts
from pdmux_ray.workload.requests import Ask, Workload
from pdmux_ray.workload.scaling import Scaling
from pdmux_ray.workload.shapes import SHAPES, fixed
from pdmux_ray.workload.traces import MAX_TOKENS, read_azure, read_mooncake

MAX_RUN_TOKENS = 1 << 28  # of all prompts together; they are kept in memory, 8 bytes a token

SPECS = (*SHAPES, "mooncake:FILE", "azure:FILE", "prompts:FILE", "fixed:IN,OUT")


@dataclass
class TokenWorkload:
    """A `Workload` of token ids: outlines of a source, scaled, filled with content. The newest `asks` is described, too."""

    source: OutlineSource
    scaling: Scaling
    token_ids: tuple[int, int]  # prompts are of ids from the first one to below the second one
    _newest: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        TokenContent(self.token_ids, 0)  # a wrong range is an error now, not in the middle of a run

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def description(self) -> Sequence[str]:
        return [*self.source.facts, *self.scaling.rules, *self._newest]

    def asks(self, count: int, seed: int) -> list[Ask]:
        """Raises ConfigError when there are fewer, or when their prompts are too much for the memory."""
        asks = self.lazily(count, seed)
        if (tokens := sum(outline.prompt_tokens for outline in asks.outlines)) > MAX_RUN_TOKENS:
            raise ConfigError(
                f"{count} prompts of {self.name} have {tokens:,} tokens, too many to be kept in memory (at most "
                f"{MAX_RUN_TOKENS:,}). Ask for fewer requests, or scale the lengths."
            )
        return list(asks)

    def lazily(self, count: int, seed: int) -> LazyAsks:
        """The same ones, for who takes one after the other. Raises ConfigError when there are fewer."""
        return LazyAsks(self.outlines(count, seed), TokenContent(self.token_ids, seed, self.name))

    def outlines(self, count: int, seed: int) -> list[Outline]:
        """What `asks` fills with content."""
        if count < 1:
            raise ConfigError(f"A workload has at least one request, not {count}.")
        if seed < 0:
            raise ConfigError(f"A seed is 0 or more, not {seed}.")
        divided = [self.scaling.divided(outline) for outline in self.source.outlines(count, seed)]
        capped = [self.scaling.capped(outline) for outline in divided]
        self._newest = _tally(divided, capped, self.scaling.max_context)
        return capped


def load_workload(
    spec: str, *, scaling: Scaling | None = None, token_ids: tuple[int, int], limits: Limits | None = None
) -> Workload:
    """See the module's docstring. Raises ConfigError; TraceError, which is one, where a file is at fault."""
    scaling = scaling or Scaling()
    kind, colon, rest = spec.partition(":")
    if not colon and kind in SHAPES:
        return TokenWorkload(SHAPES[kind], scaling, token_ids)
    if kind == "fixed" and colon:
        return TokenWorkload(fixed(*_two_lengths(rest)), scaling, token_ids)
    if kind == "prompts" and rest:
        if scaling.divide != 1:
            raise ConfigError("Texts cannot be divided: leave out the scaling, or write shorter prompts.")
        return _uncapped(read_prompts(Path(rest), limits), scaling)
    if kind in ("mooncake", "azure") and rest:
        read = read_mooncake if kind == "mooncake" else read_azure
        return TokenWorkload(read(Path(rest), limits), scaling, token_ids)
    raise ConfigError(f"There is no workload {spec!r}. Use one of {', '.join(SPECS)}.")


def _uncapped(prompts: PromptFile, scaling: Scaling) -> PromptFile:
    if scaling.max_context is None:
        return prompts
    line = f"Texts are not capped: the server refuses one that does not fit into its context, {scaling.max_context} tokens."
    return replace(prompts, description=[*prompts.description, line])


def _two_lengths(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d{1,8},\d{1,8}", text, re.ASCII):
        raise ConfigError(f"Fixed lengths are like fixed:512,64 (prompt and output tokens), not fixed:{text}.")
    prompt, output = (int(part) for part in text.split(","))
    if not (1 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS):
        raise ConfigError(f"Fixed lengths are 1 to {MAX_TOKENS} tokens, not {text}.")
    return prompt, output


def _tally(divided: Sequence[Outline], capped: Sequence[Outline], max_context: int | None) -> list[str]:
    """What the requests came out as, and what the cap did to them."""
    lines = [
        f"As sent, {len(capped)} requests: prompt tokens {_summary([o.prompt_tokens for o in capped])}; output tokens "
        f"{_summary([o.output_tokens for o in capped])}; {reusable_fraction(capped):.1%} of prompt blocks reusable."
    ]
    if max_context is not None:
        shortened = sum(after is not before for before, after in zip(divided, capped, strict=True))
        means = [
            f"{np.mean([o.prompt_tokens for o in outlines]):,.0f} + {np.mean([o.output_tokens for o in outlines]):,.0f}"
            for outlines in (divided, capped)
        ]
        lines.append(
            f"The cap of {max_context} tokens shortened {shortened} of {len(capped)} requests ({shortened / len(capped):.1%}); "
            f"mean prompt + output {means[0]} before, {means[1]} after."
        )
    return lines


def _summary(tokens: Sequence[int]) -> str:
    p50, p90, p99 = np.percentile(tokens, [50, 90, 99])
    return f"mean {np.mean(tokens):,.0f}, p50 {p50:,.0f}, p90 {p90:,.0f}, p99 {p99:,.0f}, max {max(tokens):,}"
