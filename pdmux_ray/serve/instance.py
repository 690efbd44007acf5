"""One engine as a Serve replica: its step loop in a thread of its own, one stream of step messages per gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import InstanceUnavailableError, PdmuxError
from pdmux_ray.serve import wire
from pdmux_ray.serve.pinned import own_replica_id
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import NewRequest, TokenEvent

HEARTBEAT_S = 1.0  # a message at least this often, so that load figures stay fresh and a dead instance is noticed


class Sink:
    """What waits to be sent to one gateway. Owner: the replica's event loop."""

    def __init__(self) -> None:
        self.requests: set[str] = set()  # not finished yet
        self.events: list[wire.Event] = []
        self.wake = asyncio.Event()
        self.replaced = False  # the gateway attached anew; this stream ends

    def add(self, events: list[wire.Event]) -> None:
        self.events += events
        self.requests.difference_update(event[0] for event in events if len(event) > 2 and event[3] is not None)
        self.wake.set()

    def take(self) -> list[wire.Event]:
        self.wake.clear()
        events, self.events = self.events, []
        return events


class Instance:
    """Deployment. Every public method runs on the replica's event loop and never waits for the engine."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        tokenizer = Tokenizer.load(model_dir)
        self._id = own_replica_id()
        self._sinks: dict[str, Sink] = {}
        self._seen_s: dict[str, float] = {}  # gateway id -> when it last called `describe`
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = resolve_limits(config, tokenizer.context_length, tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._engine = Engine(build_runner(model_dir, config), limits, self._publish)
        self._engine.start()

    async def describe(self, gateway_id: str) -> dict[str, Any]:
        """Who this is. Gateways call it all the time: it is also their sign of life."""
        self._seen_s[gateway_id] = time.monotonic()
        limits = self._engine.limits
        return {
            "instance_id": self._id,
            "context_length": limits.context_length,
            "vocab_size": limits.vocab_size,
            "problem": self._engine.problem(),
        }

    async def attach(self, gateway_id: str, lease_s: float, instance: str) -> AsyncGenerator[wire.Message, None]:
        """The gateway's stream: one message per step with new tokens of its requests, and a heartbeat when there are none.

        Ends when the gateway attaches anew or has not called `describe` for `lease_s`. However it ends (also when Serve
        cancels it because the gateway died), the gateway's requests are aborted.
        """
        self._loop = asyncio.get_running_loop()
        if (old := self._sinks.pop(gateway_id, None)) is not None:
            old.replaced = True
            old.wake.set()
        sink = self._sinks[gateway_id] = Sink()
        self._seen_s[gateway_id] = time.monotonic()
        try:
            while not sink.replaced and time.monotonic() - self._seen_s[gateway_id] < lease_s:
                yield wire.pack_load(self._engine.load()), sink.take()
                await _wait(sink.wake, HEARTBEAT_S)
        finally:
            self._engine.abort(sink.requests)
            if self._sinks.get(gateway_id) is sink:
                del self._sinks[gateway_id], self._seen_s[gateway_id]

    async def submit(self, gateway_id: str, requests: list[NewRequest], instance: str) -> wire.Reply:
        """All of them or none. Their tokens go to the gateway's stream, which must be attached."""
        sink = self._sinks.get(gateway_id)
        accepted: list[str] = []
        try:
            if sink is None:
                raise InstanceUnavailableError("The stream to the instance is being set up. Try again.")
            for request in requests:
                self._engine.submit(request)
                accepted.append(request.request_id)
        except PdmuxError as error:
            self._engine.abort(accepted)
            return wire.pack_refusal(error), wire.pack_load(self._engine.load())
        sink.requests.update(accepted)
        return None, wire.pack_load(self._engine.load())

    async def abort(self, request_ids: list[str], instance: str) -> None:
        """Idempotent; unknown ids are ignored."""
        self._engine.abort(request_ids)

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises several times in a row."""
        problem = self._engine.problem()
        if problem is not None:
            raise PdmuxError(problem)

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):  # not when the constructor failed
            await asyncio.to_thread(self._engine.close)

    def _publish(self, gateway_id: str, events: list[TokenEvent]) -> None:
        """In the engine's thread, once per step and gateway."""
        packed = [wire.pack_event(event) for event in events]
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, gateway_id, packed)

    def _deliver(self, gateway_id: str, events: list[wire.Event]) -> None:
        if (sink := self._sinks.get(gateway_id)) is not None:
            sink.add(events)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
