"""Least squares without negative or, along the units, rising terms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TOLERANCE = 1e-10


def nnls(rows: Floats, targets: Floats) -> Floats:
    """The x >= 0 [N] that minimises |rows x - targets|; rows [M, N], targets [M].

    The active-set method of Lawson and Hanson, Solving Least Squares Problems, chapter 23. Columns are scaled to length 1
    first; one of zeros gets 0.
    """
    lengths = np.linalg.norm(rows, axis=0)
    scaled = rows / np.where(lengths > 0, lengths, 1.0)
    solution = np.zeros(rows.shape[1])
    active = np.zeros(rows.shape[1], dtype=bool)
    scale = _TOLERANCE * max(float(np.linalg.norm(targets)), 1e-300)
    for _ in range(10 * rows.shape[1]):
        gradient = scaled.T @ (targets - scaled @ solution)
        gradient[active] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= scale:
            break
        active[entering] = True
        solution = _within(scaled, targets, solution, active)
    return solution / np.where(lengths > 0, lengths, 1.0)


def _within(rows: Floats, targets: Floats, solution: Floats, active: NDArray[np.bool_]) -> Floats:
    """Moves from `solution` to the least squares of the active columns, and drops those that would turn negative on the way."""
    while True:
        trial = np.zeros_like(solution)
        trial[active] = np.linalg.lstsq(rows[:, active], targets, rcond=None)[0]
        negative = active & (trial <= 0)
        if not negative.any():
            return trial
        steps = solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)
        solution = solution + float(steps.min()) * (trial - solution)
        active &= ~(negative & (solution <= _TOLERANCE * max(float(solution.max()), 1.0)))
        if not active.any():
            return np.zeros_like(solution)


def falling_nnls(
    levels: list[int], level_of: list[int], rows: Floats, shared: Floats, targets: Floats
) -> tuple[Floats, Floats]:
    """Isotonic: terms [len(levels), N] >= 0, none larger than at a lower level, and terms [S] that all levels share.

    Row m was measured at `level_of[m]`: rows [M, N], shared [M, S]. The errors are relative to `targets`.
    A term at a level is a sum of non-negative steps, from the highest level down, so one `nnls` gives the best of both.
    """
    place = {level: index for index, level in enumerate(levels)}
    at = np.array([place[level] for level in level_of])
    steps = [np.where((at <= index)[:, None], rows, 0.0) for index in range(len(levels))]
    columns = np.hstack([*steps, shared]) / targets[:, None]
    solution = nnls(columns, np.ones(len(targets)))
    parts = solution[: len(levels) * rows.shape[1]].reshape(len(levels), rows.shape[1])
    return np.cumsum(parts[::-1], axis=0)[::-1], solution[parts.size :]
