"""Traces of real services: Mooncake's JSONL and Azure's CSV. They have lengths and times, and no content.

Mooncake (Qin et al., FAST '25; files `FAST25-release/traces/*.jsonl` of github.com/kvcache-ai/Mooncake, Apache-2.0): one JSON
object a line with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`, one for each 512-token
block of the prompt and one for the rest. Equal ids mean equal content up to and including that block.

Azure (Patel et al., "Splitwise", ISCA '24; files `AzureLLMInferenceTrace_*.csv` of github.com/Azure/AzurePublicDataset,
CC-BY-4.0): columns TIMESTAMP, ContextTokens, GeneratedTokens. Nothing says what prompts have in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count as counting
from pathlib import Path
from typing import Any

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.lines import Limits, TraceError, numbered_lines
from pdmux_ray.workload.outline import BLOCK_TOKENS, Outline

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MAX_TOKENS = 1 << 24  # a length beyond it is a mistake in the file, not a request
_MAX_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file, in its order. An `OutlineSource`: the seed changes content, never lengths or times."""

    name: str
    facts: Sequence[str]
    requests: Sequence[Outline]

    def outlines(self, count: int, seed: int) -> list[Outline]:
        """The first `count` requests. Raises ConfigError when there are fewer: repeating them would repeat their prompts."""
        if count > len(self.requests):
            raise ConfigError(f"{self.name} has {len(self.requests)} requests: ask for no more, not for {count}.")
        return list(self.requests[:count])


def read_mooncake(path: Path, limits: Limits | None = None) -> Trace:
    """Raises TraceError."""
    requests: list[Outline] = []
    first_ms = latest_ms = 0.0
    for line, text in numbered_lines(path, limits or Limits()):
        try:
            timestamp_ms, outline = _mooncake_request(text)
            if requests and timestamp_ms < latest_ms:
                raise ValueError(f"timestamp {timestamp_ms:g} is before that of the line above, {latest_ms:g}")
        except ValueError as error:
            raise TraceError(path, line, f"{error}.") from None
        first_ms, latest_ms = (first_ms if requests else timestamp_ms), timestamp_ms
        requests.append(Outline(outline.prompt_tokens, outline.output_tokens, outline.blocks, (timestamp_ms - first_ms) / 1000))
    return _trace(
        path,
        "mooncake",
        requests,
        f"Requests of a trace in Mooncake's format, {path.name}: lengths, times and shared {BLOCK_TOKENS}-token blocks are the "
        f"trace's; tokens are made up, a block's from its hash id.",
    )


def read_azure(path: Path, limits: Limits | None = None) -> Trace:
    """Raises TraceError."""
    fresh = counting()
    requests: list[Outline] = []
    first = latest = None
    lines = numbered_lines(path, limits or Limits())
    number, header = next(lines, (1, ""))
    if header.split(",") != AZURE_COLUMNS:
        raise TraceError(path, number, f"the first line must be {','.join(AZURE_COLUMNS)}, not {header[:80]!r}.")
    for number, text in lines:
        try:
            time, prompt, output = _azure_row(text)
            if latest is not None and time < latest:
                raise ValueError("TIMESTAMP is before that of the line above")
        except ValueError as error:
            raise TraceError(path, number, f"{error}.") from None
        first, latest = first or time, time
        requests.append(Outline(prompt, output, unshared(prompt, fresh), (time - first).total_seconds()))
    return _trace(
        path,
        "azure",
        requests,
        f"Requests of a trace in Azure's format, {path.name}: lengths and times are the trace's. It does not say what prompts "
        f"share, so they share nothing; tokens are made up.",
    )


def unshared(prompt_tokens: int, fresh: Iterator[int]) -> tuple[int, ...]:
    """Blocks of a prompt that shares nothing. `fresh` gives ids that nobody else has."""
    return tuple(next(fresh) for _ in range(blocks_of(prompt_tokens)))


def blocks_of(prompt_tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-prompt_tokens // BLOCK_TOKENS)


def _trace(path: Path, kind: str, requests: list[Outline], fact: str) -> Trace:
    if not requests:
        raise TraceError(path, None, "has no requests.")
    return Trace(f"{kind}:{path.name}", (fact,), requests)


def _mooncake_request(text: str) -> tuple[float, Outline]:
    """(timestamp in ms, outline without a time). Raises ValueError."""
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"is not JSON: {text[:80]!r}") from None
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < _MAX_ID:
        raise ValueError("timestamp must be a number of milliseconds, 0 or more")
    prompt = _integer(fields, "input_length", 1, MAX_TOKENS)
    output = _integer(fields, "output_length", 0, MAX_TOKENS)
    return float(timestamp), Outline(prompt, output, _hash_ids(fields, prompt))


def _hash_ids(fields: Mapping[str, Any], prompt_tokens: int) -> tuple[int, ...]:
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(value) is int and 0 <= value <= _MAX_ID for value in ids):
        raise ValueError("hash_ids must be a list of integers from 0 to 2**63 - 1")
    if len(ids) != blocks_of(prompt_tokens):
        raise ValueError(
            f"has {len(ids)} hash_ids, but {prompt_tokens} tokens are {blocks_of(prompt_tokens)} blocks of {BLOCK_TOKENS}"
        )
    return tuple(ids)


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}")
    return value


def _azure_row(text: str) -> tuple[datetime, int, int]:
    """(time, prompt tokens, output tokens). Raises ValueError."""
    cells = text.split(",")
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"has {len(cells)} columns, not {len(AZURE_COLUMNS)}")
    try:
        time: datetime | None = datetime.fromisoformat(cells[0])
    except ValueError:
        time = None
    if time is None or time.tzinfo is not None:
        raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:15:46.680, not {cells[0][:40]!r}")
    if not all(cell.isascii() and cell.isdigit() and len(cell) <= 9 for cell in cells[1:]):
        raise ValueError("ContextTokens and GeneratedTokens must be whole numbers")
    values = {name: int(cell) for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True)}
    return time, _integer(values, "ContextTokens", 1, MAX_TOKENS), _integer(values, "GeneratedTokens", 0, MAX_TOKENS)
