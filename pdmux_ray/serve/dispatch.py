"""The engine requests of one answer, wherever they run: on one instance, and on another when that one goes away.

What another instance needs to go on is the gateway's log: the prompt, the sampling parameters (which always have a seed) and
the tokens so far. A token is a function of these alone, so the answer is the one that it would have been.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from pdmux_ray.errors import InstanceUnavailableError
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics, Resumption
from pdmux_ray.serve.answer import PATIENCE_S
from pdmux_ray.serve.generation import Choice
from pdmux_ray.serve.links import Link, Links
from pdmux_ray.serve.mailbox import Mailbox
from pdmux_ray.serve.tracing import UNTRACED, Trace
from pdmux_ray.serve.wire import Event
from pdmux_ray.types import NewRequest

MAX_LOSSES = 3  # of an answer without a token in between: it may be what the instances die of


class Dispatch:
    """Implements `pdmux_ray.serve.answer.Requests`. Owner: the answer."""

    def __init__(
        self,
        choices: Sequence[Choice],
        requests: Sequence[NewRequest],
        link: Link,
        links: Links,
        metrics: GatewayMetrics,
        trace: Trace = UNTRACED,
    ) -> None:
        """`requests` of the choices, as they go to `link` first."""
        self._choices = choices
        self._requests = requests
        self._link = link
        self._prefill: tuple[str, ...] = ()  # instances that may have KV of the prompts; the requests name those of `link`
        self._links = links
        self._metrics = metrics
        self._trace = trace
        self._mailbox = Mailbox(self.leave_all)
        self._running: dict[int, str] = {}  # choice index -> request id at `_link`
        self._submissions = 0
        self._deadline_s = 0.0
        self.sent_s = 0.0
        self._tokens = 0  # of all choices, when an instance was lost last
        self._losses = 0  # since there have been so many
        self._avoided: set[str] = set()  # instances, as long

    async def start(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        try:
            await self._submit()
        except InstanceUnavailableError as error:
            await self._move(error)

    async def take(self) -> list[tuple[int, Event]]:
        while True:
            try:
                return await self._mailbox.take()
            except InstanceUnavailableError as error:
                await self._move(error)

    def lost(self, error: InstanceUnavailableError) -> None:
        self._mailbox.fail(error)

    def fail(self, error: Exception) -> None:
        self._mailbox.fail(error)

    def ended(self, index: int) -> None:
        self._running.pop(index, None)

    def leave(self, index: int) -> None:
        request_id = self._running.pop(index, None)
        if request_id is not None:
            self._link.abort([request_id])

    def leave_all(self) -> None:
        self._link.abort(list(self._running.values()))
        self._running.clear()

    async def _submit(self) -> None:
        """Sends what is unfinished to `_link`. Another mailbox each time: the last one may hold its line's failure."""
        self._mailbox = Mailbox(self.leave_all)
        requests = {choice.index: self._request(choice) for choice in self._choices if choice.finish is None}
        self._submissions += 1
        self.sent_s = time.monotonic()
        async with asyncio.timeout_at(self._deadline_s + PATIENCE_S):
            left_s = self._deadline_s - asyncio.get_running_loop().time()
            await self._link.submit(requests, self._mailbox, left_s)
        self._running = {index: request.request_id for index, request in requests.items()}

    def _request(self, choice: Choice) -> NewRequest:
        request = self._requests[choice.index]
        if not self._submissions:
            return request
        # Another name each time: the instance may be the one that had it before, and not have ended it yet.
        name = f"{request.request_id}.{self._submissions}"
        return replace(request, request_id=name, generated=tuple(choice.tokens), prefill_peers=self._prefill)

    def _known_tokens(self) -> list[tuple[int, ...]]:
        """Of what is unfinished: what is to be prefilled."""
        return [(*self._requests[choice.index].prompt, *choice.tokens) for choice in self._choices if choice.finish is None]

    async def _move(self, error: InstanceUnavailableError) -> None:
        """Goes on at another instance. Raises `error`, which the last one was lost with, when there is none to try."""
        self.leave_all()
        tokens = sum(choice.completion_tokens for choice in self._choices)
        if tokens > self._tokens:
            self._tokens, self._losses, self._avoided = tokens, 0, set()
        self._losses += 1
        self._avoided.add(self._link.instance_id)
        if self._losses == MAX_LOSSES:
            self._metrics.resumed(Resumption.TRIED_ENOUGH)
            raise error
        outcome = Resumption.REFUSED
        try:
            while not await self._goes_on():
                self._avoided.add(self._link.instance_id)
            outcome = Resumption.RESUMED
        except InstanceUnavailableError:
            outcome = Resumption.NO_INSTANCE
            raise error from None
        finally:
            self._metrics.resumed(outcome)

    async def _goes_on(self) -> bool:
        """Whether the next best instance takes what is unfinished. Raises InstanceUnavailableError when there is none."""
        self._link, choice = self._links.choose(self._known_tokens(), self._avoided)
        self._prefill = choice.prefill
        self._metrics.routed(choice)
        self._trace.routed(choice)
        try:
            await self._submit()
        except InstanceUnavailableError:
            return False
        return True
