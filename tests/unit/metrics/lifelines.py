"""Requests as they might have gone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from pdmux_ray.metrics.lifeline import Lifeline


def served(*arrivals: float | tuple[float, int], due_s: float = 0.0, sent_s: float | None = None) -> Lifeline:
    """A complete request, by its arrivals of tokens: when, or (when, how many)."""
    lifeline = Lifeline(due_s, due_s if sent_s is None else sent_s)
    noted(lifeline, arrivals)
    lifeline.complete(lifeline.token_s[-1] if lifeline.token_s else due_s, "length")
    return lifeline


def noted(lifeline: Lifeline, arrivals: Sequence[float | tuple[float, int]]) -> list[float | None]:
    """What `tokens_arrived` said of each."""
    return [lifeline.tokens_arrived(*(at if isinstance(at, tuple) else (at, 1))) for at in arrivals]


def stalled_queue(requests: int, period_s: float, begin_s: float, end_s: float) -> list[Lifeline]:
    """One request every `period_s`; the server answers each at once with one token, but none from `begin_s` to `end_s`, after
    which all that have waited are answered."""
    due_s = [index * period_s for index in range(requests)]
    return [served(end_s if begin_s <= due < end_s else due, due_s=due) for due in due_s]


times_s = st.floats(0, 1e6)
arrivals = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), max_size=30)  # (seconds after the one before, tokens)


@st.composite
def lifelines(draw: st.DrawFn) -> Lifeline:
    """Of any fate."""
    now_s = due_s = draw(times_s)
    lifeline = Lifeline(due_s, due_s + draw(st.floats(0, 1)), prompt_tokens=draw(st.integers(0, 100)))
    lifeline.asked_tokens = draw(st.none() | st.integers(1, 50))
    for after_s, count in draw(arrivals):
        now_s += after_s
        lifeline.tokens_arrived(now_s, count)
    match draw(st.sampled_from(["complete", "fail", "leave", "unsent"])):
        case "complete":
            lifeline.complete(now_s, "stop")
        case "fail":
            lifeline.fail(now_s, "HTTP 500")
        case "unsent":
            lifeline = Lifeline(due_s)
    return lifeline
