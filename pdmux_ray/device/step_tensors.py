"""A step in tensors: what the model needs to know of a StepBatch. Shared by all devices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdmux_ray.engine.runner import SequenceView, StepBatch
from pdmux_ray.model.ops import AttentionBatch


class StepTensors:
    """Token ids [T] int64, where each lives, and the step's rows to sample from. Decodes come first, then prefill slices.

    `sampled` and `rows` (indices into T) are in the order of StepOutput. Made anew for each step; on the CPU.
    """

    def __init__(self, batch: StepBatch, page_size: int, rope_lengths: bool) -> None:
        decodes, prefills = batch.decodes, batch.prefills
        self.sequences: list[SequenceView] = [*decodes, *(piece.sequence for piece in prefills)]
        starts = [*(len(s.tokens) - 1 for s in decodes), *(piece.start for piece in prefills)]
        counts = [1] * len(decodes) + [piece.tokens for piece in prefills]
        ends = np.cumsum(counts)
        ids = [s.tokens[-1] for s in decodes]
        for piece in prefills:
            ids.extend(piece.sequence.tokens[piece.start : piece.start + piece.tokens])
        self.token_ids = torch.tensor(ids)
        self.sampled = [*decodes, *(piece.sequence for piece in prefills if piece.sample)]
        wanted = [True] * len(decodes) + [piece.sample for piece in prefills]
        self.rows: Tensor = torch.from_numpy(ends[wanted] - 1)
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(ids)) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        contexts = np.add(starts, counts)
        table = self._page_table(contexts, page_size)
        slots = table[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size
        lengths = None
        if rope_lengths:
            prompts = np.array([s.prompt_tokens for s in self.sequences])
            lengths = torch.from_numpy(np.maximum(prompts[owner], positions + 1))
        self.batch = AttentionBatch(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            context_lengths=torch.from_numpy(contexts.astype(np.int32)),
            page_table=torch.from_numpy(table),
            rope_lengths=lengths,
            decodes=len(decodes),
        )

    def _page_table(self, contexts: np.ndarray, page_size: int) -> np.ndarray:
        pages = -(-contexts // page_size)
        table = np.zeros((len(pages), int(pages.max())), dtype=np.int32)
        for row, (sequence, count) in enumerate(zip(self.sequences, pages.tolist(), strict=True)):
            table[row, :count] = sequence.pages[:count]
        return table
