"""A device without a model: time passes as configured, and the next token is a pure function of (seed, tokens so far).

It keeps a "KV" of its own: the entry of a position is a hash over all tokens up to there, written into and read from pages as
a real device would. So a page that is shared, evicted or handed out wrongly changes the tokens, as it would with a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.clock import Clock
from pdmux_ray.engine.runner import GiveUp, SequenceView, StepBatch, StepOutput, never
from pdmux_ray.types import TokenLogprobs

_MASK = 2**61 - 1
_BLOCK_S = 0.02  # how often a step with prefills asks whether to give up


def _extend(kv: int, token: int) -> int:
    return (kv * 6364136223846793005 + token + 1442695040888963407) & _MASK


def _token(kv: int, seed: int, vocab_size: int) -> int:
    mixed = (kv ^ seed) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed ^ mixed >> 29) % vocab_size


def fake_token(seed: int, tokens: Sequence[int], vocab_size: int) -> int:
    """What a FakeRunner samples after these tokens."""
    kv = 0
    for token in tokens:
        kv = _extend(kv, token)
    return _token(kv, seed, vocab_size)


class FakeRunner:
    """A `Runner`. A step takes `step_s` plus `prefill_s_per_token` for each prefill token, counted from its launch."""

    def __init__(
        self, pages: int, page_size: int, step_s: float, prefill_s_per_token: float, clock: Clock, *, vocab_size: int = 32_000
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self._step_s = step_s
        self._prefill_s_per_token = prefill_s_per_token
        self._clock = clock
        self._kv = [0] * (pages * page_size)
        self._output: StepOutput | None = None
        self._launched = False
        self._ready_at_s = 0.0

    def launch(self, batch: StepBatch, give_up: GiveUp = never) -> None:
        prefill_tokens = sum(piece.tokens for piece in batch.prefills)
        self._launched, self._output = True, None
        self._ready_at_s = self._clock.now() + self._step_s + prefill_tokens * self._prefill_s_per_token
        while batch.prefills and (left_s := self._ready_at_s - self._clock.now()) > _BLOCK_S:
            if give_up():
                return
            self._clock.sleep(min(left_s, _BLOCK_S))
        sampled: list[SequenceView] = []
        tokens: list[int] = []
        for sequence in batch.decodes:
            kv = self._compute(sequence, len(sequence.tokens) - 1, 1)
            sampled.append(sequence)
            tokens.append(_token(kv, sequence.params.seed, self.vocab_size))
        for piece in batch.prefills:
            kv = self._compute(piece.sequence, piece.start, piece.tokens)
            if piece.sample:
                sampled.append(piece.sequence)
                tokens.append(_token(kv, piece.sequence.params.seed, self.vocab_size))
        self._output = StepOutput(tokens)
        if any(sequence.params.logprobs is not None for sequence in sampled):
            self._output.logprobs = [self._logprobs(s, token) for s, token in zip(sampled, tokens, strict=True)]

    def collect(self) -> StepOutput | None:
        if not self._launched:
            raise RuntimeError("collect was called without a launched step")
        output, self._output, self._launched = self._output, None, False
        if output is not None:
            self._clock.sleep(self._ready_at_s - self._clock.now())
        return output

    def close(self) -> None:
        self._output, self._launched = None, False

    def _compute(self, sequence: SequenceView, start: int, count: int) -> int:
        """Writes the KV of tokens [start, start + count) and returns the last one."""
        tokens, pages, size = sequence.tokens, sequence.pages, self.page_size
        before = start - 1
        kv = self._kv[pages[before // size] * size + before % size] if start else 0
        for position in range(start, start + count):
            kv = _extend(kv, tokens[position])
            self._kv[pages[position // size] * size + position % size] = kv
        return kv

    def _logprobs(self, sequence: SequenceView, token: int) -> TokenLogprobs | None:
        """Made up: the chosen token is the likeliest, the others follow it in id order."""
        count = sequence.params.logprobs
        if count is None:
            return None
        top = tuple(((token + rank) % self.vocab_size, -0.5 - rank) for rank in range(min(count, self.vocab_size)))
        return TokenLogprobs(-0.5, top)
