"""What prompts are made of: token ids from block ids, and files of ready-made prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.lines import Limits, TraceError, numbered_lines
from pdmux_ray.workload.outline import Outline
from pdmux_ray.workload.requests import Ask

MIN_IDS = 100  # with fewer ids, prompts that should have nothing in common would begin alike by chance
MAX_ID = 1 << 24  # no vocabulary has more
MAX_OUTPUT_TOKENS = 1 << 24

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class TokenContent:
    """Makes prompts of token ids in [low, high). Token k of block b is a hash of (salt, seed, b, k) alone, so that equal blocks
    are equal wherever they stand, also when they are cut, and different ones have no beginning in common."""

    def __init__(self, token_ids: tuple[int, int], seed: int, salt: str = "") -> None:
        """`salt` keeps workloads apart that number their blocks alike. Raises ConfigError when the range has fewer than
        MIN_IDS ids, begins below 0 or ends beyond MAX_ID."""
        low, high = token_ids
        if high > MAX_ID:
            raise ConfigError(f"Token ids end below {MAX_ID}, not at {high}.")
        if low < 0 or high - low < MIN_IDS:
            raise ConfigError(f"Prompts need at least {MIN_IDS} token ids from 0 on, not those from {low} to below {high}.")
        # Python's integers, once: a long workload then costs 8 bytes a token, not 40.
        self._ids = np.arange(low, high).astype(object)
        salt_key = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "big")
        self._seed_key = _mix(np.array([salt_key ^ (seed & _MASK)], dtype=np.uint64))

    def prompt(self, outline: Outline) -> tuple[int, ...]:
        keys = _mix(self._seed_key ^ _mix(np.array(outline.blocks, dtype=np.uint64)))
        lengths = np.array(outline.block_lengths())
        starts = np.cumsum(lengths) - lengths
        places = np.arange(outline.prompt_tokens) - np.repeat(starts, lengths)
        hashes = _mix(np.repeat(keys, lengths) + places.astype(np.uint64))
        return tuple(self._ids[(hashes % np.uint64(len(self._ids))).astype(np.int64)].tolist())


@dataclass(frozen=True)
class LazyAsks:
    """Each is made when it is looked at, from its outline: all that a simulator keeps, at a small part of the memory."""

    outlines: Sequence[Outline]
    content: TokenContent

    def __len__(self) -> int:
        return len(self.outlines)

    def __getitem__(self, index: int) -> Ask:
        outline = self.outlines[index]
        return Ask(self.content.prompt(outline), outline.output_tokens, outline.trace_s)

    def __iter__(self) -> Iterator[Ask]:
        return map(self.__getitem__, range(len(self)))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers that scatters neighbours."""
    mixed = values * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class PromptFile:
    """A `Workload` of texts from a file, in its order."""

    name: str
    description: Sequence[str]
    prompts: Sequence[Ask]

    def asks(self, count: int, seed: int) -> list[Ask]:
        """The first `count`; the seed changes nothing. Raises ConfigError when there are fewer."""
        if count > len(self.prompts):
            raise ConfigError(f"{self.name} has {len(self.prompts)} prompts: ask for no more, not for {count}.")
        return list(self.prompts[:count])


def read_prompts(path: Path, limits: Limits | None = None) -> PromptFile:
    """A file that ends in .jsonl has {"prompt": text, "output_tokens": number} a line (the number may be missing: the model
    decides), any other one a text a line. Raises TraceError."""
    as_json = path.suffix == ".jsonl"
    prompts: list[Ask] = []
    for line, text in numbered_lines(path, limits or Limits()):
        try:
            prompts.append(_json_prompt(text) if as_json else Ask(text, None))
        except ValueError as error:
            raise TraceError(path, line, f"{error}.") from None
    if not prompts:
        raise TraceError(path, None, "has no prompts.")
    free = sum(ask.output_tokens is None for ask in prompts)
    description = [f"Texts of {path.name} in their order. How many tokens a text has is up to the server's tokenizer."]
    if free:
        description.append(f"The model decides the length of the output for {free} of {len(prompts)} prompts.")
    return PromptFile(f"prompts:{path.name}", description, prompts)


def _json_prompt(text: str) -> Ask:
    """Raises ValueError."""
    try:
        fields: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"is not JSON: {text[:80]!r}") from None
    if not isinstance(fields, dict) or not set(fields) <= {"prompt", "output_tokens"}:
        raise ValueError('must be a JSON object with "prompt" and "output_tokens" and nothing else')
    prompt, output = fields.get("prompt"), fields.get("output_tokens")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError('"prompt" must be a text that is not empty')
    if output is not None and (type(output) is not int or not 1 <= output <= MAX_OUTPUT_TOKENS):
        raise ValueError(f'"output_tokens" must be an integer from 1 to {MAX_OUTPUT_TOKENS}')
    return Ask(prompt, output)
