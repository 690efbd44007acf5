"""A prefill that runs by layer blocks, and who of its requests is gone.

    layers: |<-- layers_done -->|<-- in flight -->|               end_layer: where the block in flight ends;
            0                   ^ layers_done     ^ end_layer     equal to layers_done while the job rests

What a device computes of a job is fixed when the job begins: pages of a request that ends meanwhile are written until the job
has ended. So the job keeps such a request in `gone`, pages and all, and gives them up with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.engine.request import Request
from pdmux_ray.engine.runner import PrefillSlice
from pdmux_ray.policy.decisions import LaneUse
from pdmux_ray.policy.views import Piece


@dataclass(frozen=True, slots=True)
class Flight:
    """How a job's block was launched."""

    use: LaneUse
    first_layer: int
    beside_units: int  # of the decodes that were launched with it; 0: none
    launched_s: float


class Job:
    """Implements `policy.views.JobView`. Every slice reaches its request's last known token."""

    __slots__ = ("end_layer", "flight", "gone", "job_id", "layers_done", "overtaken", "pieces", "requests", "slices")

    def __init__(self, job_id: int, slices: Sequence[PrefillSlice], requests: Sequence[Request]) -> None:
        self.job_id = job_id
        self.slices = slices
        self.requests = requests
        self.pieces = [Piece(piece.tokens, piece.start) for piece in slices]
        self.layers_done = 0
        self.end_layer = 0
        self.overtaken = 0
        self.gone: list[Request] = []
        self.flight: Flight | None = None  # of the block in flight

    @property
    def in_flight(self) -> bool:
        return self.end_layer > self.layers_done

    @property
    def ends_s(self) -> float | None:
        """When the block in flight is predicted to end; None without one, or without a prediction."""
        flight = self.flight
        if flight is None or flight.use.block_s is None:
            return None
        return flight.launched_s + flight.use.block_s.predicted_s

    @property
    def wanted(self) -> bool:
        """Whether any of its requests still waits for it."""
        return len(self.gone) < len(self.requests)
