"""The jobs of a prefill lane that computes nothing: each block takes the time that somebody says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmux_ray.clock import Clock
from pdmux_ray.policy.views import Piece
from pdmux_ray.types import Split

PrefillS = Callable[[Sequence[Piece], int, int, int, bool], float]
"""Seconds of a block: the arguments of `CostModel.prefill`."""


@dataclass(slots=True)
class _Job:
    pieces: Sequence[Piece]
    layers_done: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    job_id: int
    end_layer: int
    prefill_units: int
    took_s: float
    ready_s: float


class TimedBlocks:
    """What a `LaneRunner` promises of its jobs and blocks, but for what they compute."""

    def __init__(self, layers: int, units: int, clock: Clock, prefill_s: PrefillS) -> None:
        self.block_s = 0.0  # of the last one that was collected
        self._layers = layers
        self._units = units
        self._clock = clock
        self._prefill_s = prefill_s
        self._jobs: dict[int, _Job] = {}
        self._flight: _Flight | None = None

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def units(self) -> int:
        """Of the block in flight; 0 without one."""
        return self._flight.prefill_units if self._flight else 0

    @property
    def done(self) -> bool:
        return self._flight is None or self._clock.now() >= self._flight.ready_s

    def open(self, job_id: int, pieces: Sequence[Piece]) -> None:
        self._jobs[job_id] = _Job(pieces)

    def launch(self, job_id: int, end_layer: int, split: Split) -> None:
        if self._flight is not None:
            raise RuntimeError("a block was launched while another one is in flight")
        job = self._jobs[job_id]
        beside = split.decode_units if split.prefill_units < self._units else 0
        layers, last = end_layer - job.layers_done, end_layer == self._layers
        took_s = self._prefill_s(job.pieces, layers, split.prefill_units, beside, last)
        self._flight = _Flight(job_id, end_layer, split.prefill_units, took_s, self._clock.now() + took_s)

    def collect(self) -> int | None:
        """Waits for the block in flight, which is none any more. The job that has ended with it: when it was its last."""
        flight, self._flight = self._flight, None
        if flight is None:
            raise RuntimeError("collect_block was called without a block in flight")
        self._clock.sleep(flight.ready_s - self._clock.now())
        self.block_s = flight.took_s
        self._jobs[flight.job_id].layers_done = flight.end_layer
        if flight.end_layer < self._layers:
            return None
        del self._jobs[flight.job_id]
        return flight.job_id

    def drop(self, job_id: int) -> None:
        if self._flight is not None and self._flight.job_id == job_id:
            raise RuntimeError(f"job {job_id} was dropped while its block is in flight")
        del self._jobs[job_id]

    def clear(self) -> None:
        self._flight = None
        self._jobs.clear()
