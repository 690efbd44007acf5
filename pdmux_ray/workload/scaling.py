"""How a workload is made smaller for a small model or a small machine. Every rule here is a sentence of `rules`. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.outline import BLOCK_TOKENS, Outline


@dataclass(frozen=True, slots=True)
class Scaling:
    """Applied in this order: divide, floor, cap. Raises ConfigError when it cannot hold."""

    divide: float = 1.0  # lengths and blocks become this many times shorter; rounded up
    max_context: int | None = None  # prompt + output tokens; None: no cap
    min_prompt_tokens: int = 1
    min_output_tokens: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.divide <= BLOCK_TOKENS:
            raise ConfigError(f"Lengths can be divided by 1 to {BLOCK_TOKENS} (a block keeps a token), not {self.divide:g}.")
        if min(self.min_prompt_tokens, self.min_output_tokens) < 1:
            raise ConfigError("The least length of a prompt and of an output is 1 token.")
        least = self.min_prompt_tokens + self.min_output_tokens
        if self.max_context is not None and self.max_context < least:
            raise ConfigError(f"A context of {self.max_context} tokens cannot hold the least request, {least} tokens.")

    @property
    def rules(self) -> list[str]:
        rules = []
        if self.divide != 1:
            rules.append(
                f"Scaling: prompt and output lengths are divided by {self.divide:g} and rounded up; the blocks that prompts "
                f"share are divided alike, so that the same prefixes are shared."
            )
        if max(self.min_prompt_tokens, self.min_output_tokens) > 1:
            rules.append(
                f"Scaling: a prompt has at least {self.min_prompt_tokens} tokens, an output at least {self.min_output_tokens}."
            )
        if self.max_context is not None:
            rules.append(
                f"Cap: a request of more than {self.max_context} tokens (prompt + output) is shortened to that, prompt and "
                f"output in proportion; a prompt keeps its beginning and its last block."
            )
        return rules

    def divided(self, outline: Outline) -> Outline:
        """Divided and floored, not yet capped."""
        prompt = max(self.min_prompt_tokens, math.ceil(outline.prompt_tokens / self.divide))
        output = max(self.min_output_tokens, math.ceil(outline.output_tokens / self.divide))
        return _resized(replace(outline, block_tokens=outline.block_tokens / self.divide), prompt, output)

    def capped(self, outline: Outline) -> Outline:
        """Of a divided outline; the same object where it fits."""
        total = outline.prompt_tokens + outline.output_tokens
        if self.max_context is None or total <= self.max_context:
            return outline
        prompt = outline.prompt_tokens * self.max_context // total
        prompt = min(max(prompt, self.min_prompt_tokens), self.max_context - self.min_output_tokens)
        return _resized(outline, prompt, self.max_context - prompt)


def _resized(outline: Outline, prompt_tokens: int, output_tokens: int) -> Outline:
    """The last block stays last whatever is cut: it is what tells requests about the same document from each other."""
    needed = 1
    while needed < len(outline.blocks) and math.floor(needed * outline.block_tokens) < prompt_tokens:
        needed += 1
    blocks = (*outline.blocks[: needed - 1], outline.blocks[-1])
    return replace(outline, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=blocks)
