"""A request before it has content: how long it is and which blocks its prompt is made of. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

BLOCK_TOKENS = 512  # the block of Mooncake's traces; the shapes of this project use it, too


@dataclass(frozen=True, slots=True)
class Outline:
    """Lengths and blocks of one request.

    Block i of a prompt holds the tokens [floor(i * block_tokens), floor((i + 1) * block_tokens)), the last one all that are
    left. Two prompts share a prefix exactly as far as their ids are the same: a block's content depends on its id alone.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # ids, 0 to 2**63 - 1; at least one
    trace_s: float | None = None  # when it came in its trace, from the trace's first request
    block_tokens: float = BLOCK_TOKENS

    def block_lengths(self) -> list[int]:
        """Tokens of each block; their sum is `prompt_tokens`."""
        starts = [math.floor(i * self.block_tokens) for i in range(len(self.blocks))]
        return [end - start for start, end in zip(starts, [*starts[1:], self.prompt_tokens], strict=True)]


class OutlineSource(Protocol):
    """Where outlines come from: a trace or a shape."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Sequence[str]:
        """Lines for the report: where the numbers come from, and what was assumed."""

    def outlines(self, count: int, seed: int) -> list[Outline]:
        """The same ones for the same arguments; the first n of `count` are the ones that n asks for."""


def reusable_fraction(outlines: Sequence[Outline]) -> float:
    """The share of all blocks that an unlimited prefix cache would have when their request comes: leading blocks that an
    earlier request had, by all blocks. At least one outline."""
    seen: set[int] = set()
    hits = 0
    for outline in outlines:
        hits += sum(1 for _ in _leading(outline.blocks, seen))
        seen.update(outline.blocks)
    return hits / sum(len(outline.blocks) for outline in outlines)


def _leading(blocks: Sequence[int], seen: set[int]) -> Iterator[int]:
    for block in blocks:
        if block not in seen:
            return
        yield block
