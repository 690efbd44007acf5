"""The rates at which a study of servers looks for what they carry, and how clear a result must be. Pure."""

from __future__ import annotations

from pdmux_ray.tune.grid import ladder

STEP = 1.12  # from one rate to the next
BELOW, ABOVE = 0.05, 2.5  # of what eight at once in prefill_first carry: the lowest and the highest, about
LEVEL = 0.1  # chance of so clear a result, on either side, where the share that is good is just the attainment


def rates(carried_rps: float, least_rps: float) -> list[float]:
    """Ascending, none under `least_rps`, at least one."""
    return ladder(max(BELOW * carried_rps, least_rps), ABOVE * carried_rps, STEP)
