"""Requests of one phase, in order of arrival."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from pdmux_ray.engine.request import Request

_ARRIVAL = attrgetter("arrival")


class Queue(list[Request]):
    """Changed by `put` and `remove` alone. Owner: the step loop's thread; a copy that `noted` has handed out is for any.

    Most steps change no queue, so who wants one of every step pays for the few that did.
    """

    copies = 0  # made so far
    _noted: tuple[Request, ...] | None = None  # None: not since the last change

    def put(self, request: Request) -> None:
        """Into its place by arrival."""
        self._noted = None
        if not self or self[-1].arrival < request.arrival:
            self.append(request)
        else:
            insort(self, request, key=_ARRIVAL)

    def remove(self, request: Request) -> None:
        self._noted = None
        super().remove(request)

    @property
    def noted(self) -> tuple[Request, ...]:
        """A copy, the same one until the queue changes."""
        if self._noted is None:
            self._noted = tuple(self)
            self.copies += 1
        return self._noted
