"""What a fleet could carry at best, in closed form: no queue, no spread of lengths, nothing lost. It says in which order and
at which rate candidates are tried first; it decides nothing. Pure.

    rate <= min( (x + m) / p,  (m + y) / d,  (x + m + y) / (p + d) )

x instances prefill, m do both, y decode; p and d are the seconds of an instance that a mean request's prefill and decodes take.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pdmux_ray.costs.device import DeviceModel
from pdmux_ray.policy.views import Piece
from pdmux_ray.tune.candidates import Topology


@dataclass(frozen=True, slots=True)
class Work:
    """Of the mean request, in seconds of one instance."""

    prefill_s: float
    decode_s: float

    def most_rps(self, topology: Topology) -> float:
        """Requests a second. Infinite when no work is left for anybody."""
        x, m, y = topology.prefill, topology.mux, topology.decode
        limits = ((x + m, self.prefill_s), (m + y, self.decode_s), (x + m + y, self.prefill_s + self.decode_s))
        return min(count / seconds if seconds else float("inf") for count, seconds in limits)


def work(device: DeviceModel, lengths: Sequence[tuple[int, int]], cached: float, itl_s: float, max_batch: int) -> Work:
    """Of requests of such (prompt tokens, output tokens). `cached`: the share of prompts that prefix caches have. Decodes go in
    the largest batch whose step is within `itl_s`, with room in the pool."""
    layers, units = device.layout.layers, device.units

    def prefill_s(prompt: int) -> float:
        reused = min(int(prompt * cached), prompt - 1)
        return device.costs.prefill((Piece(prompt - reused, reused),), layers, units, 0, True).predicted_s

    outputs = fmean(output for _, output in lengths)
    context = fmean(prompt + output / 2 for prompt, output in lengths)
    pool = device.layout.pages * device.layout.page_size

    def step_s(batch: int) -> float:
        return device.costs.decode(batch, int(batch * context), units, 0).predicted_s

    most = max(1, min(max_batch, int(pool / context)))
    batch = max(1, bisect_right(range(1, most + 1), itl_s, key=step_s))
    return Work(fmean(prefill_s(prompt) for prompt, _ in lengths), outputs * step_s(batch) / batch)
