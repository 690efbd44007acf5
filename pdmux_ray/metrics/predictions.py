"""How good predictions of what steps take were. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdmux_ray.metrics.lifeline import quantile

ROUNDING_S = 1e-6  # bounds are told in milliseconds with three digits


@dataclass(frozen=True, slots=True)
class Judged:
    """Of at least one prediction. An error is |predicted - measured| / measured; over is who took longer than the bound."""

    steps: int
    over_share: float
    median_error: float
    p90_error: float

    @classmethod
    def of(cls, steps: Iterable[tuple[float | None, float | None, float]]) -> Judged | None:
        """`steps`: predicted, its 99 % bound and measured, in seconds. None when nothing was predicted."""
        told = [
            (predicted_s, bound_s, took_s) for predicted_s, bound_s, took_s in steps if predicted_s is not None and took_s > 0
        ]
        if not told:
            return None
        errors = sorted([abs(predicted_s - took_s) / took_s for predicted_s, _, took_s in told])
        over = sum(bound_s is not None and took_s > bound_s + ROUNDING_S for _, bound_s, took_s in told)
        return cls(len(told), over / len(told), quantile(errors, 0.5), quantile(errors, 0.9))
