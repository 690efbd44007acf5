"""A made-up `CostModel` in four lines of arithmetic: for tests, and for simulations of devices that were not measured.

Computing scales with the units; a decode's reading of weights and context does so only up to `knee` units, as where a few
units use up the memory's bandwidth. Units that both lanes use count half for each. No more units are ever slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.policy.views import Estimate, Piece


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """Seconds; all but the fixed ones of the whole device. The defaults are about a 135M model on two cores."""

    units: int = 2  # of the device
    layers: int = 30  # of the model
    knee: int = 1_000_000  # more units read no faster
    fixed_s: float = 0.001  # a launch, of a step or a block
    weights_s: float = 0.015  # a step reads all weights once
    request_s: float = 0.0015  # a decode computes
    context_s: float = 1e-6  # a decode reads a context token's KV
    token_s: float = 0.001  # a prefill computes a token in all layers
    pair_s: float = 2e-7  # and its attention to another
    contention: float = 0.1  # of a lane's time that another beside it on all units adds
    head_s: float = 0.0  # the output head, which the last block has
    guard: float = 1.15  # bound over prediction
    switch_s: float = 0.001

    def decode(self, batch: int, context_tokens: int, units: int, prefill_units: int) -> Estimate:
        reading = (self.weights_s + self.context_s * context_tokens) * self._slower(units, prefill_units, self.knee)
        computing = self.request_s * batch * self._slower(units, prefill_units, self.units)
        return self._estimate(self.fixed_s + reading + computing)

    def prefill(self, pieces: Sequence[Piece], layers: int, units: int, decode_units: int, last: bool) -> Estimate:
        share = layers / self.layers
        computing = self._prefill_s(pieces) * share * self._slower(units, decode_units, self.units)
        reading = self.weights_s * share * self._slower(units, decode_units, self.knee)
        return self._estimate(self.fixed_s + computing + reading + self.head_s * last)

    def mixed(self, batch: int, context_tokens: int, pieces: Sequence[Piece], units: int) -> Estimate:
        decoding = self.decode(batch, context_tokens, units, 0).predicted_s  # it reads the weights for both
        return self._estimate(decoding + self._prefill_s(pieces) * self._slower(units, 0, self.units))

    def _prefill_s(self, pieces: Sequence[Piece]) -> float:
        return sum(self.token_s * n + self.pair_s * n * (n / 2 + prior) for n, prior in pieces)

    def _slower(self, units: int, beside: int, enough: int) -> float:
        """How much longer than on the whole device, beside a lane on `beside` units."""
        own = units - max(units + beside - self.units, 0) / 2
        return min(self.units, enough) / min(own, enough) * (1 + self.contention * beside / self.units)

    def _estimate(self, predicted_s: float) -> Estimate:
        return Estimate(predicted_s, predicted_s * self.guard)
