"""Figures and names as texts: one way to write them, on the terminal and on pages."""

from __future__ import annotations

import math

from pdmux_ray.metrics.goodput import Bound, Slo
from pdmux_ray.metrics.summary import Summary

NONE = "–"  # no sample

_BOUNDS = {
    Bound.MEASURED.value: "",
    Bound.AT_LEAST.value: "at least ",
    Bound.BELOW.value: "below ",
    Bound.UNKNOWN.value: "",
}
_MEANINGS = {
    Bound.MEASURED.value: "the attainment was lost between two measured rates",
    Bound.AT_LEAST.value: "the attainment held at every measured rate: offer more to find the limit",
    Bound.BELOW.value: "the attainment did not hold at the lowest measured rate: offer less to find the limit",
    Bound.UNKNOWN.value: "there is no valid run at an offered rate",
}


def significant(value: float | None, digits: int = 3) -> str:
    """`digits` significant ones and never an exponent: 0.0123, 1.23, 123, 12,345."""
    if value is None:
        return NONE
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, decimals)}f}"


def ms(seconds: float | None) -> str:
    """Milliseconds, without the unit."""
    return NONE if seconds is None else significant(seconds * 1e3)


def duration(seconds: float) -> str:
    """With its unit: 250 ms, 1.5 s."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def percent(fraction: float) -> str:
    """To a tenth, and only 1 is 100 %: 0.9996 is 99.9 %, for a miss must not be rounded away."""
    return f"{int(fraction * 1000 + 1e-9) / 10:g} %"


def rate(rps: float) -> str:
    """Without a unit: 4, 2.5, 3.0625."""
    return f"{rps:.6g}"


def slo(limits: Slo) -> str:
    """One line: TTFT ≤ 500 ms and p99 of the request's ITLs ≤ 50 ms."""
    parts = []
    if limits.ttft_s is not None:
        more = f" + {duration(limits.ttft_s_per_token)} per prompt token" if limits.ttft_s_per_token else ""
        parts.append(f"TTFT ≤ {duration(limits.ttft_s)}{more}")
    if limits.itl_s is not None:
        parts.append(f"{limits.itl_statistic} of the request's ITLs ≤ {duration(limits.itl_s)}")
    return " and ".join(parts) or "none: every complete request is good"


def goodput(summary: Summary) -> str:
    """The figure alone: "at least 7.25", "below 2"."""
    if summary.goodput_bound == Bound.UNKNOWN.value:
        return "unknown"
    below = summary.goodput_bound == Bound.BELOW.value
    rps = min(run.rate for run in summary.runs if run.invalid is None) / summary.devices if below else summary.goodput_rps
    return _BOUNDS[summary.goodput_bound] + significant(rps)


def goodput_unit(summary: Summary) -> str:
    """Nothing when the goodput is unknown."""
    if summary.goodput_bound == Bound.UNKNOWN.value:
        return ""
    return "requests/s" if summary.devices == 1 else f"requests/s per device ({summary.devices} devices)"


def goodput_interval(summary: Summary) -> str:
    """Nothing when the goodput is unknown."""
    if summary.goodput_bound == Bound.UNKNOWN.value:
        return ""
    low, high = summary.goodput_ci
    return f"95 % interval {significant(low)} to {significant(high)}"


def goodput_meaning(summary: Summary) -> str:
    """What kind of figure it is, as a clause."""
    return _MEANINGS[summary.goodput_bound]


def printable(text: str) -> str:
    """Names and errors come from servers: what would move a cursor or reorder a line is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
