from __future__ import annotations

from pdmux_ray.engine.queues import Queue
from pdmux_ray.engine.request import Request

from .world import PAGE, request


def arrival(number: int) -> Request:
    made = Request(
        request(f"r{number}"), context_length=64, eos_token_ids=frozenset(), page_size=PAGE, prefix_cache=True, now=0.0
    )
    made.arrival = number
    return made


def test_whoever_comes_back_stands_where_its_arrival_puts_it() -> None:
    queue, requests = Queue(), [arrival(number) for number in range(4)]
    for number in (1, 3, 0, 2):
        queue.put(requests[number])
    assert queue == requests


def test_a_note_stays_as_it_was_and_there_is_a_new_one_after_a_change_only() -> None:
    queue, (first, second) = Queue(), [arrival(number) for number in range(2)]
    queue.put(first)
    note = queue.noted
    assert queue.noted is note
    queue.put(second)
    assert (note, queue.noted) == ((first,), (first, second))
    queue.remove(first)
    assert (queue.noted, queue.copies) == ((second,), 3)
