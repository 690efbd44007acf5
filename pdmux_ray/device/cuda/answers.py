"""Sampled tokens: chosen on the device, or on the host for rows that need it, and back as a StepOutput.

A row's token depends on that row alone: whether its neighbours are sampled on the host changes nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmux_ray.device.cuda.inputs import Tensors
from pdmux_ray.device.cuda.streams import Streams
from pdmux_ray.device.sampler import Sampler
from pdmux_ray.engine.runner import SequenceView, StepOutput


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of logits is sampled; [N] each, on the device. `uniforms`: in [0, 1), one a row."""

    uniforms: Tensor  # float32
    temperature: Tensor  # float32; 0: the best token
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32
    min_p: Tensor  # float32

    @classmethod
    def of(cls, tensors: Tensors, uniforms: Tensor) -> SamplingRows:
        """`tensors`: by the names in `inputs.SAMPLING`."""
        return cls(uniforms, tensors["temperature"], tensors["top_k"], tensors["top_p"], tensors["min_p"])


# logits [N, V] float32, how, out [N] int64 -> None. Allocates nothing and never waits; may be captured in a graph.
Sample = Callable[[Tensor, SamplingRows, Tensor], None]


class Answers:
    """One lane's way back to the host, and the sampler of what is chosen there."""

    def __init__(self, streams: Streams, steps: int, rows: int, vocab: int) -> None:
        """Room for the tokens of `steps` steps, and for logits of one, of up to `rows` rows."""
        self._tokens = streams.pinned((steps, rows), torch.int64)
        self._logits = streams.pinned((rows, vocab), torch.float32)
        self._sampler = Sampler()

    def send(self, step: int, tokens: Tensor, logits: Tensor, hosted: Sequence[int]) -> None:
        """Work for a stream. tokens [N] and logits [N, V] on the device; of the logits only the rows `hosted` go."""
        self._tokens[step, : len(tokens)].copy_(tokens, non_blocking=True)
        for place, row in enumerate(hosted):
            self._logits[place].copy_(logits[row], non_blocking=True)

    def read(self, step: int, sequences: Sequence[SequenceView], hosted: Sequence[int]) -> StepOutput:
        """What was sent, once the stream is past it. `sequences` are the rows, in order."""
        output = StepOutput(self._tokens[step, : len(sequences)].tolist())
        if not hosted:
            return output
        chosen = self._sampler.sample(self._logits[: len(hosted)], [sequences[row] for row in hosted])
        for row, token in zip(hosted, chosen.tokens, strict=True):
            output.tokens[row] = token
        if chosen.logprobs:
            output.logprobs = [None] * len(sequences)
            for row, logprobs in zip(hosted, chosen.logprobs, strict=True):
                output.logprobs[row] = logprobs
        return output


def host_sampled(sequences: Sequence[SequenceView]) -> list[int]:
    """The rows that the device cannot choose for: their tokens depend on tokens before, or log probabilities are wanted."""
    return [row for row, sequence in enumerate(sequences) if sequence.params.host_sampled]
