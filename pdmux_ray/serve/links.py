"""A gateway's links to the instances: one stream from each, fanned out to the HTTP requests whose tokens it carries."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from pdmux_ray.errors import InstanceUnavailableError
from pdmux_ray.policy.decisions import RouteChoice
from pdmux_ray.policy.routing import choose_instance
from pdmux_ray.policy.views import InstanceView
from pdmux_ray.serve import wire
from pdmux_ray.serve.answer import Mailbox
from pdmux_ray.types import Load, NewRequest

SILENCE_S = 5.0  # an instance that sends no message for so long (heartbeats come every second) is not given requests
ABSENT_ROUNDS = 3  # an instance that discovery has missed so often is on its way out
LEASE_ROUNDS = 10  # discovery rounds that a gateway may miss before an instance takes it for dead

log = logging.getLogger("ray.serve")


class Link:
    """One instance as this gateway knows it."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.instance_id: str = description["instance_id"]
        self.context_length: int = description["context_length"]
        self.vocab_size: int = description["vocab_size"]
        self.load: Load | None = None  # None until the stream's first message
        self.load_s = 0.0  # when it came (monotonic)
        self.on_their_way = 0  # requests in a submit that is not answered yet
        self.problem: str | None = None  # the engine's own word, of the last discovery round
        self.absent_rounds = 0  # discovery rounds in a row that did not list it
        self.requests: dict[str, tuple[Mailbox, int]] = {}  # request id -> (mailbox, choice index)

    def update(self, load: tuple[Any, ...]) -> None:
        self.load = wire.unpack_load(load)
        self.load_s = time.monotonic()

    def deliver(self, events: Sequence[wire.Event]) -> None:
        """Once per step: the hot path. Events of requests that nobody waits for any more are dropped."""
        requests = self.requests
        for event in events:
            last = len(event) > 2 and event[3] is not None
            target = requests.pop(event[0], None) if last else requests.get(event[0])
            if target is not None:
                target[0].put(target[1], event)

    def trouble(self, stall_timeout_s: float) -> str | None:
        """Why no request should go there; None when it is well."""
        if self.load is None:
            return "its stream has not begun"
        silence_s = time.monotonic() - self.load_s
        if silence_s > SILENCE_S:
            return f"no word from it for {silence_s:.1f} s"
        age_s = self.load.heartbeat_age_s + silence_s
        if age_s > stall_timeout_s:
            return f"its engine's step loop has not come round for {age_s:.1f} s"
        return self.problem


class Links:
    """All links of one gateway. Owner: its event loop."""

    def __init__(self, handle: DeploymentHandle, gateway_id: str, discovery_period_s: float, stall_timeout_s: float) -> None:
        self.by_id: dict[str, Link] = {}
        self._handle = handle
        self.gateway_id = gateway_id
        self._period_s = discovery_period_s
        self._stall_timeout_s = stall_timeout_s
        self._rng = random.Random()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._context = contextvars.copy_context()  # see _spawn

    def start(self) -> None:
        self._spawn(self._discover())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def loads(self) -> dict[str, Load]:
        """Instance id -> its newest load figures."""
        return {link.instance_id: link.load for link in self.by_id.values() if link.load is not None}

    def context_length(self) -> int | None:
        """Tokens, as the instances say; None while none is linked."""
        return min((link.context_length for link in self.by_id.values()), default=None)

    def troubles(self) -> dict[str, str]:
        """Instance id -> what is wrong, for the instances that are not well."""
        found = {link.instance_id: link.trouble(self._stall_timeout_s) for link in self.by_id.values()}
        return {instance_id: why for instance_id, why in found.items() if why is not None}

    def choose(self) -> tuple[Link, RouteChoice]:
        """Raises InstanceUnavailableError that says what is wrong with each instance."""
        views = []
        for link in self.by_id.values():
            if link.absent_rounds < ABSENT_ROUNDS and link.load is not None and link.trouble(self._stall_timeout_s) is None:
                load = link.load
                views.append(InstanceView(link.instance_id, load.running, load.waiting, load.free_pages, link.on_their_way))
        choice = choose_instance(views, self._rng)
        if choice is None:
            raise InstanceUnavailableError(f"No instance can take requests now ({self.summary()}). Try again soon.")
        return self.by_id[choice.instance_id], choice

    def summary(self) -> str:
        if not self.by_id:
            return "none is linked"
        return "; ".join(f"{instance_id}: {why}" for instance_id, why in self.troubles().items()) or "all are leaving"

    async def submit(self, link: Link, requests: list[NewRequest], mailbox: Mailbox) -> None:
        """All or none. Raises what the instance refuses with, or InstanceUnavailableError.

        When the caller is cancelled meanwhile, whatever the instance accepts is aborted as soon as its answer is there.
        """
        for index, request in enumerate(requests):
            link.requests[request.request_id] = (mailbox, index)
        link.on_their_way += len(requests)
        call = self._spawn(self._submit(link, requests))
        try:
            await asyncio.shield(call)
        except BaseException:
            ids = [request.request_id for request in requests]
            self._forget(link, ids)
            call.add_done_callback(lambda call: self._abort_if_accepted(call, link, ids))
            raise

    def abort(self, link: Link, request_ids: Sequence[str]) -> None:
        """Ends requests; returns before the instance knows."""
        self._forget(link, request_ids)
        if request_ids and self.by_id.get(link.instance_id) is link:
            self._spawn(self._abort(link, list(request_ids)))

    def _abort_if_accepted(self, call: asyncio.Task[Any], link: Link, request_ids: list[str]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.abort(link, request_ids)

    def _forget(self, link: Link, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            link.requests.pop(request_id, None)

    async def _submit(self, link: Link, requests: list[NewRequest]) -> None:
        try:
            refusal, load = await self._handle.submit.remote(self.gateway_id, requests, instance=link.instance_id)
        except Exception as error:
            raise InstanceUnavailableError(f"The instance could not be reached: {_reason(error)}. Try again.") from error
        finally:
            link.on_their_way -= len(requests)
        link.update(load)
        if refusal is not None:
            raise wire.unpack_refusal(refusal)

    async def _abort(self, link: Link, request_ids: list[str]) -> None:
        with contextlib.suppress(Exception):  # an instance that cannot be reached aborts them when its stream ends
            await self._handle.abort.remote(request_ids, instance=link.instance_id)

    async def _discover(self) -> None:
        while True:
            try:
                answers = await self._handle.broadcast("describe", self.gateway_id).results_async(
                    timeout_s=max(2.0, 2 * self._period_s), return_exceptions=True
                )
                self._sync([answer for answer in answers if isinstance(answer, dict)])
            except Exception as error:  # no replica yet, or one does not answer: the streams show who is well
                log.debug("Listing the instances failed: %s", _reason(error))
            await asyncio.sleep(self._period_s)

    def _sync(self, descriptions: list[dict[str, Any]]) -> None:
        """Links new instances; leaves those that Serve has taken off its list once their requests are done."""
        listed = {description["instance_id"]: description for description in descriptions}
        for instance_id, description in listed.items():
            if instance_id not in self.by_id:
                self._connect(Link(description))
        for link in list(self.by_id.values()):
            link.absent_rounds = 0 if link.instance_id in listed else link.absent_rounds + 1
            link.problem = listed.get(link.instance_id, {}).get("problem")
            if link.absent_rounds >= ABSENT_ROUNDS and not link.requests:
                self._streams[link.instance_id].cancel()  # lets a draining replica end

    def _connect(self, link: Link) -> None:
        self.by_id[link.instance_id] = link
        self._streams[link.instance_id] = self._spawn(self._follow(link))

    async def _follow(self, link: Link) -> None:
        """Reads an instance's stream until it ends; discovery links the instance again if it is still there."""
        why = "its stream ended"
        try:
            stream = self._handle.options(stream=True).attach.remote(
                self.gateway_id, LEASE_ROUNDS * self._period_s, instance=link.instance_id
            )
            async for load, events in stream:
                link.update(load)
                link.deliver(events)
        except Exception as error:
            why = _reason(error)
        finally:
            del self.by_id[link.instance_id], self._streams[link.instance_id]
            self._fail(link, why)

    def _fail(self, link: Link, why: str) -> None:
        log.warning("Link to instance %s lost (%s); %d requests fail.", link.instance_id, why, len(link.requests))
        for mailbox, _ in link.requests.values():
            mailbox.fail(InstanceUnavailableError("The instance that served this request went away. Send it again."))
        link.requests.clear()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs outside the HTTP request's context: Serve cancels the calls made in it when the client goes away."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no message'}"
