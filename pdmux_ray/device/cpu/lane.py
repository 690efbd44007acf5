"""What one lane computes with: operations, buffers and a sampler of its own, over the shared weights and KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmux_ray.device.sampler import Sampler
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import GiveUp, StepBatch, StepOutput
from pdmux_ray.model.decoder import Decoder


@dataclass(slots=True)
class Forward:
    """A step, or the prefills of a job, on the way through the layers; it may rest between any two of them."""

    step: StepTensors
    layers_done: int = 0
    hidden: Tensor | None = None  # [T, H] after `layers_done` layers; None before the first


class Lane:
    """One thread at a time; two lanes may compute at once when neither reads pages that the other writes."""

    def __init__(self, decoder: Decoder, page_size: int) -> None:
        self.layers = decoder.config.layers
        self._decoder, self._page_size = decoder, page_size
        self._sampler = Sampler()

    def begin(self, batch: StepBatch) -> Forward:
        """Reads the batch's tokens and pages; any lane may run it."""
        return Forward(StepTensors(batch, self._page_size, self._decoder.config.rope.dynamic))

    def advance(self, forward: Forward, end_layer: int) -> None:
        with torch.inference_mode():
            hidden = self._decoder.embed(forward.step.token_ids) if forward.hidden is None else forward.hidden
            forward.hidden = self._decoder.run_layers(forward.layers_done, end_layer, hidden, forward.step.batch)
        forward.layers_done = end_layer

    def advance_unless(self, give_up: GiveUp, forward: Forward) -> bool:
        """All layers, one by one, asking before each; False when given up."""
        for layer in range(forward.layers_done, self.layers):
            if give_up():
                return False
            self.advance(forward, layer + 1)
        return True

    def finish(self, forward: Forward) -> StepOutput:
        """The tokens of one that is through all layers."""
        step, hidden = forward.step, forward.hidden
        if not step.sampled or hidden is None:
            return StepOutput()
        with torch.inference_mode():
            logits = self._decoder.logits(hidden if len(step.rows) == len(hidden) else hidden[step.rows])
            return self._sampler.sample(logits, step.sampled)

    def block(self, forward: Forward, end_layer: int) -> StepOutput | None:
        """The layers up to `end_layer`; the sampled tokens after the last."""
        self.advance(forward, end_layer)
        return self.finish(forward) if end_layer == self.layers else None
