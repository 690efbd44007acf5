"""Events of one HTTP request, between the line that brings them and the handler that waits for them. Knows nothing of ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdmux_ray.errors import RequestError
from pdmux_ray.serve.wire import Event

MAX_TAKEN = 256  # events that are handled without a turn for others
MAX_BACKLOG = 10_000  # events of one answer that wait for its client to read


class UnreadAnswerError(RequestError):
    """The client does not read its answer."""


class Mailbox:
    """Events of one HTTP request, from the link that reads them to the handler that waits for them."""

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        """`on_overflow` is called when the handler has not come for `MAX_BACKLOG` events; the mailbox has failed then."""
        self._events: list[tuple[int, Event]] = []  # (choice index, event)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_overflow = on_overflow

    def put(self, index: int, event: Event) -> None:
        """Once it has failed, nothing is kept any more."""
        if self._error is not None:
            return
        if len(self._events) >= MAX_BACKLOG:
            self._events.clear()
            self.fail(UnreadAnswerError(f"The answer is ended: {MAX_BACKLOG} pieces of it were not read. Read it as it comes."))
            self._on_overflow()
            return
        self._events.append((index, event))
        self._wake()

    def fail(self, error: Exception) -> None:
        """What has arrived is still delivered first."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[tuple[int, Event]]:
        """What is new, from one event to `MAX_TAKEN`. Raises what it failed with."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()  # cheaper than an asyncio.Event, once per token
            await self._waiter
        if len(self._events) <= MAX_TAKEN:
            events, self._events = self._events, []
            return events
        await asyncio.sleep(0)  # a client that reads again must not hold up the others
        events = self._events[:MAX_TAKEN]
        del self._events[:MAX_TAKEN]
        return events or await self.take()  # it may have overflowed in between

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
