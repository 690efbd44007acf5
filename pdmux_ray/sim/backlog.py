"""Whether a fleet keeps up with what it is offered. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdmux_ray.metrics.lifeline import Lifeline

FEW = 10  # who wait are no sign of anything
MOST_WAITING = 0.05  # of the requests, when the last one comes
GROWTH = 1.5  # of those who wait, from half of the arrivals to their end; of a queue that keeps growing it is 2


def falls_behind(lifelines: Sequence[Lifeline]) -> str | None:
    """Of a run in open loop, in the order of arrival: what shows that the rate cannot be carried for long. None: nothing does.

    Whoever was refused counts as waiting: a full queue grows no more.
    """
    half_s, last_s = (lifelines[len(lifelines) // 2].due_s, lifelines[-1].due_s)
    half, last = _waiting(lifelines, half_s), _waiting(lifelines, last_s)
    if last <= max(FEW, MOST_WAITING * len(lifelines), GROWTH * half):
        return None
    refused = next((f" The first that was refused: {life.error}" for life in lifelines if life.error), "")
    return (
        f"the rate cannot be carried: {last} of {len(lifelines)} requests had no first token when the last one came, {half} "
        f"when half of them had come. The longer such a run, the worse its figures.{refused}"
    )


def _waiting(lifelines: Sequence[Lifeline], now_s: float) -> int:
    """Those who had come and had no token then."""
    return sum(life.due_s <= now_s and not (life.token_s and life.token_s[0] <= now_s) for life in lifelines)
