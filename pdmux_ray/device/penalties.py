"""Repetition, presence and frequency penalties, counted incrementally.

Repetition (> 1 makes a token less likely) looks at prompt and generated tokens; presence and frequency at generated ones only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdmux_ray.engine.runner import SequenceView
from pdmux_ray.types import SamplingParams

_IDLE_STEPS = 256  # a request that has not been sampled for so many steps is forgotten; if it comes back, it is counted anew


def penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class _Counts:
    """Distinct tokens of one sequence and how often each was generated."""

    def __init__(self, sequence: SequenceView) -> None:
        self.sequence = sequence
        self.seen_tokens = 0
        self.last_step = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._generated = np.zeros(64, dtype=np.float32)

    def add(self, tokens: list[int], generated: bool) -> None:
        for token in tokens:
            at = self._index.setdefault(token, len(self._index))
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
            self._ids[at] = token
            self._generated[at] += generated
        self.seen_tokens += len(tokens)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(token ids int64, times generated float32) of the distinct tokens."""
        distinct = len(self._index)
        return torch.from_numpy(self._ids[:distinct]), torch.from_numpy(self._generated[:distinct])


class Penalties:
    """Keeps counts of a sequence as long as it grows; what is not the same object, or has not grown, is counted anew."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}  # by request id
        self._step = 0

    def apply(self, rows: list[tuple[Tensor, SequenceView]]) -> None:
        """Changes each row [V] of logits (float32) in place. One call a step."""
        self._step += 1
        for logits, sequence in rows:
            self._apply_row(logits, sequence.params, *self._count(sequence).tensors())
        for request_id in [key for key, counts in self._counts.items() if counts.last_step < self._step - _IDLE_STEPS]:
            del self._counts[request_id]

    def _count(self, sequence: SequenceView) -> _Counts:
        counts, tokens = self._counts.get(sequence.request_id), sequence.tokens
        if counts is None or counts.sequence is not sequence or counts.seen_tokens >= len(tokens):
            counts = self._counts[sequence.request_id] = _Counts(sequence)
        counts.last_step = self._step
        if counts.seen_tokens < sequence.prompt_tokens:
            counts.add(list(tokens[: sequence.prompt_tokens]), generated=False)
        counts.add(list(tokens[counts.seen_tokens :]), generated=True)
        return counts

    @staticmethod
    def _apply_row(logits: Tensor, params: SamplingParams, ids: Tensor, generated: Tensor) -> None:
        ids, generated = ids.to(logits.device), generated.to(logits.device)
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            values = torch.where(values > 0, values / factor, values * factor)
        values -= params.presence_penalty * (generated > 0) + params.frequency_penalty * generated
        logits[ids] = values
