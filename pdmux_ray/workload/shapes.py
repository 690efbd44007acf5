"""Four workloads whose data is not here, from their published statistics, and requests of one fixed length.

What each source states, what was assumed beside it and how far it could be checked: docs/workloads.md. In short:

ShareGPT      ShareGPT_V3_unfiltered_cleaned_split.json as the serving benchmarks of vLLM and SGLang take it: the first
              question of a conversation and its answer, 4 to 1,024 prompt tokens, at most 2,048 with the answer. Means as
              their runs of 1,000 requests print them. Outputs have the quantiles of the short requests of Mooncake's synthetic
              trace, a third of which is ShareGPT, scaled to that mean.
LooGLE        Li et al., arXiv:2311.04939: 776 documents of over 24,000 tokens, 6,448 questions.
OpenThoughts  OpenThoughts-114k, Guha et al., arXiv:2506.04178, which has no statistics of lengths.
Tool&Agent    Qin et al., "Mooncake", FAST '25, table 2: 23,608 requests, 8,596 prompt and 182 output tokens, 59 % of blocks
              reusable. Medians, p99 and the shares of the system prompts are others' counts of the released trace.

Least and most, and the means that are not above, are quoted second-hand from the table of workloads of Cui et al.,
arXiv:2504.14489 (PD multiplexing), and not checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from itertools import count as counting

import numpy as np
from numpy.typing import NDArray

from pdmux_ray.workload.lengths import Fixed, Lengths, PowerLaw, Quantiles
from pdmux_ray.workload.outline import BLOCK_TOKENS, Outline
from pdmux_ray.workload.traces import unshared

_STREAM = 2  # of random numbers; arrivals have another one
STRATA = 16
STRATIFIED = (
    f"Lengths are drawn in strata: of {STRATA} in a row, one is from each {STRATA}th of the distribution, in random order, so "
    f"that short runs, too, have about the published means."
)

# (three draws uniform in [0, 1), prompt lengths as drawn, ids that nobody has) -> (prompt tokens, blocks). Keeps state from
# request to request.
Sharing = Callable[[Sequence[float], Iterator[int], Iterator[int]], tuple[int, tuple[int, ...]]]


def nothing_shared(draws: Sequence[float], lengths: Iterator[int], fresh: Iterator[int]) -> tuple[int, tuple[int, ...]]:
    """A `Sharing`: every prompt is new from its first token on."""
    tokens = next(lengths)
    return tokens, unshared(tokens, fresh)


def always_new() -> Sharing:
    return nothing_shared


@dataclass(frozen=True)
class Shape:
    """An `OutlineSource` that draws lengths from distributions."""

    name: str
    facts: Sequence[str]
    prompt: Lengths
    output: Lengths
    new_sharing: Callable[[], Sharing] = always_new
    total_limit: int | None = None  # an output ends where prompt and output have so many tokens

    def outlines(self, count: int, seed: int) -> list[Outline]:
        uniform = _draws(count, seed)
        lengths, outputs = iter(self.prompt.at(uniform[:, 0]).tolist()), self.output.at(uniform[:, 1]).tolist()
        sharing, fresh = self.new_sharing(), counting()
        made = []
        for draws, output in zip(uniform[:, 2:].tolist(), outputs, strict=True):
            prompt, blocks = sharing(draws, lengths, fresh)
            most = output if self.total_limit is None else self.total_limit - prompt
            made.append(Outline(prompt, min(output, most), blocks))
        return made


def _draws(count: int, seed: int) -> NDArray[np.float64]:
    """[count, 5], uniform in [0, 1): for prompt and output length in strata, then three. The first rows do not depend on
    `count`."""
    random = np.random.default_rng((_STREAM, seed)).random((-(-count // STRATA), 7, STRATA))
    stratified = (random[:, 0:2].argsort(axis=2) + random[:, 2:4]) / STRATA
    return np.concatenate([stratified, random[:, 4:]], axis=1).transpose(0, 2, 1).reshape(-1, 5)[:count]


class Documents:
    """A `Sharing`: several questions about each of a few documents at a time. The drawn length is the document's; its full
    blocks are shared, and the last block holds its rest and the question. A document gets 8 or 9 questions, in the mean as many
    as LooGLE's have; nothing is published of how they are spread."""

    LIVE = 4  # assumed
    QUESTIONS = 6448 / 776
    QUESTION_TOKENS = (10, 40)  # assumed

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, list[int]]] = {}  # place -> document's tokens, its full blocks
        self._left: dict[int, int] = {}  # place -> questions to come

    def __call__(self, draws: Sequence[float], lengths: Iterator[int], fresh: Iterator[int]) -> tuple[int, tuple[int, ...]]:
        place = int(draws[0] * self.LIVE)
        if place not in self._live:
            tokens = next(lengths)
            self._left[place] = int(self.QUESTIONS + draws[1])
            self._live[place] = (tokens, [next(fresh) for _ in range(tokens // BLOCK_TOKENS)])
        document_tokens, blocks = self._live[place]
        self._left[place] -= 1
        if not self._left[place]:
            del self._live[place]
        least, most = self.QUESTION_TOKENS
        prompt_tokens = document_tokens + least + int(draws[2] * (most - least))
        rest = unshared(prompt_tokens - len(blocks) * BLOCK_TOKENS, fresh)
        return prompt_tokens, (*blocks, *rest)


class Sessions:
    """A `Sharing`: agents that call tools. A session starts with one of three system prompts; a later call repeats the prompt
    of the call before it and appends. A request goes on with the live session of the longest prompt that fits into its own
    length, or, by chance, starts a new one. So lengths stay as drawn, and the chance alone sets how much is reused."""

    SYSTEM_SHARES = (10_938, 9_203, 3_449)  # requests of the released trace by their first block
    SYSTEM_BLOCKS = (12, 4, 1)  # 12: as in the lines that Mooncake's README quotes; the others assumed
    CONTINUED = 0.55  # set so that 59 % of blocks are reusable
    LIVE = 64  # assumed; the oldest one ends when there are more

    def __init__(self) -> None:
        self._systems: dict[int, list[int]] = {}  # kind -> blocks
        self._live: list[list[int]] = []  # full blocks of the newest call of each session, oldest session first

    def __call__(self, draws: Sequence[float], lengths: Iterator[int], fresh: Iterator[int]) -> tuple[int, tuple[int, ...]]:
        tokens = next(lengths)
        full = (tokens - 1) // BLOCK_TOKENS  # then comes a last block that nobody else has
        fitting = [session for session in self._live if len(session) <= full] if draws[0] < self.CONTINUED else []
        if fitting:
            session = max(fitting, key=len)
        else:
            session = list(self._system(draws[1], full, fresh))
            self._live = [*self._live[-self.LIVE + 1 :], session]
        session += [next(fresh) for _ in range(full - len(session))]
        return tokens, (*session, *unshared(tokens - full * BLOCK_TOKENS, fresh))

    def _system(self, draw: float, full: int, fresh: Iterator[int]) -> list[int]:
        """The blocks of one of the system prompts that leave room; none where not even the shortest does."""
        kinds = [kind for kind, blocks in enumerate(self.SYSTEM_BLOCKS) if blocks <= full]
        sums = list(accumulate(self.SYSTEM_SHARES[kind] for kind in kinds))
        for kind, total in zip(kinds, sums, strict=True):
            if draw * sums[-1] < total:
                if kind not in self._systems:
                    self._systems[kind] = [next(fresh) for _ in range(self.SYSTEM_BLOCKS[kind])]
                return self._systems[kind]
        return []


def fixed(prompt_tokens: int, output_tokens: int) -> Shape:
    """Every request alike in length, different in content."""
    return Shape(
        f"fixed:{prompt_tokens},{output_tokens}",
        (f"Every request has {prompt_tokens} prompt tokens and {output_tokens} output tokens. Prompts share nothing.",),
        Fixed(prompt_tokens),
        Fixed(output_tokens),
    )


SHAREGPT = Shape(
    "sharegpt",
    (
        "ShareGPT as vLLM's and SGLang's serving benchmarks take it (first question and answer; 4 to 1,024 prompt tokens, "
        "2,048 with the answer): prompt mean 217, output mean 202 tokens, as their runs of 1,000 requests print them.",
        "Assumed: prompts follow a power law between 4 and 1,024; outputs have the quantiles of the short requests of "
        "Mooncake's synthetic trace (a third of it is ShareGPT), scaled to the mean. Prompts share nothing.",
        STRATIFIED,
    ),
    PowerLaw(4, 217, 1024),
    Quantiles({0: 4, 0.1: 28, 0.25: 86, 0.5: 181, 0.75: 276, 0.9: 413, 0.99: 556, 1: 1838}),
    total_limit=2048,
)

LOOGLE = Shape(
    "loogle",
    (
        "LooGLE (arXiv:2311.04939): 776 documents of over 24,000 tokens, 6,448 questions, 8.3 a document; lengths 3,380 to "
        "81,000 and outputs 2 to 326 with mean 15, quoted second-hand from arXiv:2504.14489.",
        "Assumed: power laws between least and most; four documents at a time are asked about in random order, 8 or 9 "
        "questions each; a question has 10 to 39 tokens. Questions about a document share its full blocks of 512 tokens.",
        STRATIFIED,
    ),
    PowerLaw(3_380, 24_000, 81_000),
    PowerLaw(2, 15, 326),
    Documents,
)

OPENTHOUGHTS = Shape(
    "openthoughts",
    (
        "OpenThoughts-114k (arXiv:2506.04178) as a serving workload: prompts 311 to 4,633 tokens, mean 709; outputs 684 to "
        "32,768, mean 8,374, quoted second-hand from arXiv:2504.14489.",
        "Assumed: power laws between least and most. The system prompt that all share is shorter than a block of 512 tokens "
        "and is left out: prompts share nothing.",
        STRATIFIED,
    ),
    PowerLaw(311, 709, 4_633),
    PowerLaw(684, 8_374, 32_768),
)

TOOL_AGENT = Shape(
    "tool-agent",
    (
        "Mooncake Tool&Agent (FAST '25, table 2): prompt mean 8,596, output mean 182 tokens, 59 % of blocks reusable; prompt "
        "p50 6,346 and p99 61,525, output p50 30, and three system prompts that 46, 39 and 15 % of requests begin with, as "
        "counted in the released trace.",
        "Assumed: log-uniform between these quantiles, with the p90 (12,120 and 516) that give the means; the sessions: "
        "system prompts of 12, 4 and 1 blocks of 512 tokens, at most 64 sessions at a time; a call repeats the one before it "
        "and appends.",
        STRATIFIED,
    ),
    Quantiles({0: 891, 0.5: 6_346, 0.9: 12_120, 0.99: 61_525, 1: 126_195}),
    Quantiles({0: 1, 0.5: 30, 0.9: 516, 1: 2_000}),
    Sessions,
)

SHAPES = {shape.name: shape for shape in (SHAREGPT, LOOGLE, OPENTHOUGHTS, TOOL_AGENT)}
