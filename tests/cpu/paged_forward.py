"""A forward pass through scattered KV pages, in chunks and layer blocks of any size: what a runner does, without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from pdmux_ray.model.decoder import Decoder, DecoderConfig, load_decoder
from pdmux_ray.model.ops import AttentionBatch, Ops
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.weights import Load

PAGE_SIZE = 4
PAGES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + count) of `sequence`, to be computed in one step."""

    sequence: Sequence[int]
    prompt_tokens: int
    pages: Sequence[int]
    start: int
    count: int


def load_paged(
    model_dir: Path,
    dtype: torch.dtype = torch.float32,
    load: Load = "weights",
    config: DecoderConfig | None = None,
    make_ops: Callable[[Tensor], Ops] = ReferenceOps,
) -> Decoder:
    """A decoder over a KV pool that starts full of NaN, so that reading what was never written shows."""
    config = config or DecoderConfig.from_pretrained(model_dir)
    layout = KVLayout(config.layers, PAGES, config.kv_heads, PAGE_SIZE, config.head_dim, dtype.itemsize)
    return load_decoder(model_dir, dtype, make_ops(torch.full(layout.shape, float("nan"), dtype=dtype)), load, config)


def attention_batch(pieces: Sequence[Piece], dynamic_rope: bool) -> AttentionBatch:
    """What ops.py wants to know of a step that computes `pieces`."""
    positions = [list(range(piece.start, piece.start + piece.count)) for piece in pieces]
    slots = [
        [p.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in where]
        for p, where in zip(pieces, positions, strict=True)
    ]
    lengths = [[max(p.prompt_tokens, at + 1) for at in where] for p, where in zip(pieces, positions, strict=True)]
    used = [-(-(piece.start + piece.count) // PAGE_SIZE) for piece in pieces]
    table = [list(piece.pages[:n]) + [0] * (max(used) - n) for piece, n in zip(pieces, used, strict=True)]
    return AttentionBatch(
        positions=torch.tensor(list(chain(*positions))),
        slots=torch.tensor(list(chain(*slots))),
        query_starts=torch.tensor([0, *(piece.count for piece in pieces)]).cumsum(0).int(),
        context_lengths=torch.tensor([piece.start + piece.count for piece in pieces], dtype=torch.int32),
        page_table=torch.tensor(table, dtype=torch.int32),
        rope_lengths=torch.tensor(list(chain(*lengths))) if dynamic_rope else None,
    )


def run_step(decoder: Decoder, pieces: Sequence[Piece], layer_block: int) -> list[Tensor]:
    """Logits [count, V] of each piece; the layers run `layer_block` at a time."""
    batch = attention_batch(pieces, decoder.config.rope.dynamic)
    tokens = [token for piece in pieces for token in piece.sequence[piece.start : piece.start + piece.count]]
    with torch.inference_mode():
        hidden = decoder.embed(torch.tensor(tokens))
        for start in range(0, decoder.config.layers, layer_block):
            hidden = decoder.run_layers(start, min(start + layer_block, decoder.config.layers), hidden, batch)
        logits = decoder.logits(hidden).clone()  # the operations may keep it only until the next step
        return list(logits.split([piece.count for piece in pieces]))


def run_sequences(
    decoder: Decoder,
    sequences: Sequence[Sequence[int]],
    chunk: int | None = None,
    layer_block: int | None = None,
    prompt_tokens: int | None = None,
) -> list[Tensor]:
    """Logits [len, V] after every token of each sequence, all sequences together in each step, on random pages.

    A step computes at most `chunk` tokens (None: all) of each sequence's prompt, or one token beyond the prompt.
    The prompt is the first `prompt_tokens` (None: all).
    """
    free = random.Random(7).sample(range(PAGES), PAGES)
    tables = [[free.pop() for _ in range(-(-len(sequence) // PAGE_SIZE))] for sequence in sequences]
    done = [0] * len(sequences)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    while any(at < len(sequence) for at, sequence in zip(done, sequences, strict=True)):
        alive = [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]
        pieces = []
        for i in alive:
            prompt = prompt_tokens or len(sequences[i])
            count = min(chunk or prompt, max(prompt - done[i], 1))
            pieces.append(Piece(sequences[i], prompt, tables[i], done[i], count))
        for i, piece, logits in zip(
            alive, pieces, run_step(decoder, pieces, layer_block or decoder.config.layers), strict=True
        ):
            rows[i].append(logits)
            done[i] += piece.count
    return [torch.cat(parts) for parts in rows]
