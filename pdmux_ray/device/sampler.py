"""From logits to tokens. Shared by all devices; a row's token depends on that row, its request and nothing else in the batch.

Order: stop tokens are barred (until min_tokens) → penalties → temperature → top_k → top_p → min_p → one uniform number picks.
Log probabilities are those of the raw logits, before any of it.

The kept tokens are ordered by falling probability and `uniform(seed, position)` is looked up in their cumulated mass. The
vocabulary is not sorted for that: the best `CANDIDATES` tokens are, and the mass of the whole row is known exactly. Should
the number fall beyond the candidates, then without a filter the others follow in the order of their ids, and with one more
candidates are sorted, in the end the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmux_ray.device.penalties import Penalties, penalised
from pdmux_ray.device.uniform import uniform
from pdmux_ray.engine.runner import SequenceView, StepOutput
from pdmux_ray.types import MAX_LOGPROBS, SamplingParams, TokenLogprobs

CANDIDATES = 256
MORE_CANDIDATES = 4096

Floats = npt.NDArray[np.float64]


class Sampler:
    """Owned by one runner."""

    def __init__(self) -> None:
        self._penalties = Penalties()

    def sample(self, logits: Tensor, sequences: Sequence[SequenceView]) -> StepOutput:
        """logits [N, V] float32, one row a sequence; overwritten. Returns N tokens."""
        asked = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
        raw = torch.log_softmax(logits[asked], dim=-1) if asked else None
        self._bar_stop_tokens(logits, sequences)
        self._penalties.apply([(logits[row], s) for row, s in enumerate(sequences) if penalised(s.params)])
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
        tokens = _argmax(logits) if len(drawn) < len(sequences) else [0] * len(sequences)
        if drawn:
            some = logits if len(drawn) == len(sequences) else logits[drawn]
            for row, token in zip(drawn, _draw(some, [sequences[row] for row in drawn]), strict=True):
                tokens[row] = token
        output = StepOutput(tokens)
        if raw is not None:
            output.logprobs = [None] * len(tokens)
            for row, logprobs in zip(asked, _logprobs(raw, [tokens[r] for r in asked]), strict=True):
                wanted = sequences[row].params.logprobs or 0
                output.logprobs[row] = TokenLogprobs(logprobs.logprob, logprobs.top[:wanted])
        return output

    def _bar_stop_tokens(self, logits: Tensor, sequences: Sequence[SequenceView]) -> None:
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if params.min_tokens and len(sequence.tokens) - sequence.prompt_tokens < params.min_tokens:
                logits[row, [token for token in sequence.stop_ids if token < logits.shape[1]]] = -torch.inf


def _argmax(logits: Tensor) -> list[int]:
    """The first best token of each row; numpy's is several times as fast as torch's on the CPU."""
    if logits.device.type == "cpu":
        return [int(token) for token in logits.numpy().argmax(-1)]
    return logits.argmax(-1).tolist()


def _logprobs(raw: Tensor, tokens: list[int]) -> list[TokenLogprobs]:
    """raw [N, V] log probabilities. Always looks for MAX_LOGPROBS: a row must not depend on its neighbours."""
    chosen = raw[range(len(tokens)), tokens].tolist()
    values, ids = (best.tolist() for best in raw.topk(min(MAX_LOGPROBS, raw.shape[1]), dim=-1))
    return [TokenLogprobs(chosen[row], tuple(zip(ids[row], values[row], strict=True))) for row in range(len(tokens))]


def _draw(logits: Tensor, sequences: Sequence[SequenceView]) -> list[int]:
    """One token a row of logits [N, V], none of them greedy."""
    temperatures = torch.tensor([[sequence.params.temperature] for sequence in sequences], device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures, dim=-1)
    values, ids = logprobs.topk(min(CANDIDATES, logits.shape[1]), dim=-1)
    best, best_ids = values.cpu().numpy().astype(np.float64), ids.cpu().numpy()
    tokens = []
    for row, sequence in enumerate(sequences):
        number = uniform(sequence.params.seed, len(sequence.tokens))
        at = _pick(best[row], sequence.params, number, whole=best.shape[1] == logits.shape[1])
        tokens.append(
            _draw_beyond(logprobs[row], best_ids[row], sequence.params, number) if at is None else int(best_ids[row][at])
        )
    return tokens


def _draw_beyond(logprobs: Tensor, candidates: npt.NDArray[np.int64], params: SamplingParams, number: float) -> int:
    """The token for a row [V] whose candidates did not suffice."""
    if not _filtered(params):
        values = logprobs.cpu().numpy().astype(np.float64)
        order = np.concatenate([candidates, np.delete(np.arange(len(values)), candidates)])
        mass = np.exp(values[order]).cumsum()
        return int(order[_find(mass, number)])
    count, at = MORE_CANDIDATES, None
    while at is None:  # ends: the whole row always suffices
        count = min(count, len(logprobs))
        best, ids = logprobs.topk(count)
        at = _pick(best.cpu().numpy().astype(np.float64), params, number, whole=count == len(logprobs))
        count *= 16
    return int(ids[at])


def _pick(logprobs: Floats, params: SamplingParams, number: float, whole: bool) -> int | None:
    """Index into `logprobs`, which holds the row's best tokens, best first, of a distribution over the whole vocabulary.

    `whole`: it holds the vocabulary. None: these tokens do not suffice to know which token `number` picks.
    """
    if 0 < params.top_k <= len(logprobs):
        logprobs, whole = logprobs[: params.top_k], True
    elif not whole and params.top_k > 0 and params.top_p < 1.0:
        return None  # top_p is a share of the mass of top_k tokens, of which some are missing
    mass = np.exp(logprobs).cumsum()
    total = mass[-1] if whole else 1.0
    kept = len(mass)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(mass, params.top_p * total)) + 1  # the fewest that reach top_p
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(logprobs >= logprobs[0] + np.log(params.min_p))))
    filtered = _filtered(params)
    if not whole and (kept > len(mass) or (filtered and kept == len(mass))):
        return None
    if not whole and not filtered:
        return None if number >= mass[-1] else int(np.searchsorted(mass, number, side="right"))
    return _find(mass[: min(kept, len(mass))], number)


def _filtered(params: SamplingParams) -> bool:
    """Whether some tokens of the vocabulary are left out."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _find(mass: Floats, number: float) -> int:
    """Where `number` in [0, 1) falls in cumulated mass, of which the last entry is all there is."""
    return min(int(np.searchsorted(mass, number * mass[-1], side="right")), len(mass) - 1)
