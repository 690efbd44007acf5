"""How likely it is that something takes longer than a limit, by a prediction and its 99 % bound."""

from __future__ import annotations

import math

from pdmux_ray.policy.views import Estimate

Z99 = 2.326  # a normal variable's 99 % quantile, in deviations
LEAST_DEVIATION = 1e-3  # of the log: a bound at the prediction
_ROOT_2 = math.sqrt(2)


def chance_over(estimate: Estimate, limit_s: float) -> float:
    """0 to 1: of a log-normal whose median is the prediction and whose 99 % quantile is the bound."""
    if limit_s <= 0:
        return 1.0
    if limit_s == math.inf:
        return 0.0
    deviation = max(math.log(estimate.bound_s / estimate.predicted_s) / Z99, LEAST_DEVIATION)
    return 0.5 * math.erfc(math.log(limit_s / estimate.predicted_s) / (deviation * _ROOT_2))
