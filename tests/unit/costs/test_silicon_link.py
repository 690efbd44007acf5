"""What a slower link between GPUs makes of measured all-reduces."""

from __future__ import annotations

from dataclasses import replace

from pdmux_ray.costs.silicon import over_link
from pdmux_ray.costs.sm_share import Ramp, WholeTimes

KNOTS = (0, 64)
NOTHING = Ramp.line(KNOTS, 0.0, 0.0)
TIMES = WholeTimes(0.0, 0.0, NOTHING, 0.0, 0.0, NOTHING, 0.0, 0.0, Ramp.line(KNOTS, 8e-6, 1e-6), Ramp.line(KNOTS, 9e-6, 2e-6))


def test_a_slower_link_lengthens_what_bytes_take_and_not_what_the_smallest_message_takes() -> None:
    assert over_link(TIMES, 1.5) == replace(
        TIMES, exchange_rows=Ramp.line(KNOTS, 8e-6, 1.5e-6), exchange_tokens=Ramp.line(KNOTS, 9e-6, 3e-6)
    )


def test_on_the_link_that_was_measured_times_are_as_measured() -> None:
    assert over_link(TIMES, 1.0) == TIMES
