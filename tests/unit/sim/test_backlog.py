from __future__ import annotations

from pdmux_ray.sim.backlog import falls_behind
from tests.unit.metrics.lifelines import served


def queue(requests: int, each_s: float) -> list:  # type: ignore[type-arg]
    """One request a second; each takes so long, one after the other."""
    free_s, found = 0.0, []
    for due_s in range(requests):
        free_s = max(free_s, due_s) + each_s
        found.append(served(free_s, due_s=float(due_s)))
    return found


def test_a_queue_that_keeps_growing_is_told_of() -> None:
    told = falls_behind(queue(200, 1.5))
    assert told is not None
    assert "68 of 200 requests had no first token" in told


def test_a_queue_that_does_not_grow_is_not() -> None:
    assert falls_behind(queue(200, 0.9)) is None
    late = [served(due + 30.0, due_s=float(due)) for due in range(200)]  # always the same number waits
    assert falls_behind(late) is None


def test_a_queue_that_grew_by_less_than_a_half_since_half_of_them_had_come_may_be_chance() -> None:
    later = [served(due + 40.0 + (15.0 if due >= 100 else 0.0), due_s=float(due)) for due in range(200)]
    assert falls_behind(later) is None
    more = [served(due + 40.0 + (25.0 if due >= 100 else 0.0), due_s=float(due)) for due in range(200)]
    assert falls_behind(more) is not None


def test_a_few_who_wait_are_no_sign() -> None:
    assert falls_behind(queue(12, 5.0)) is None


def test_requests_that_were_refused_wait_for_ever_and_the_first_reason_is_told() -> None:
    refused = [served(due_s=float(due)) for due in range(40)]
    for life in refused:
        life.fail(life.due_s, f"refused at {life.due_s:g}")
    told = falls_behind(refused)
    assert told is not None
    assert told.endswith("The first that was refused: refused at 0")
