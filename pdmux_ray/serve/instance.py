"""One engine as a Serve replica: its step loop in a thread of its own, a line to every gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve

from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits, resolve_limits
from pdmux_ray.engine.runner import Runner
from pdmux_ray.engine.timeline import PAGE
from pdmux_ray.errors import InstanceUnavailableError, PdmuxError
from pdmux_ray.latency.loading import load_costs
from pdmux_ray.serve import wire
from pdmux_ray.serve.channel import Switchboard
from pdmux_ray.serve.node_address import bind_calls_to_node_address
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import TokenEvent

log = logging.getLogger("ray.serve")


class Instance:
    """Deployment. Everything but `_publish` runs on the replica's event loop, and nothing there waits for the engine."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model_dir: Path, config: EngineConfig, drain_s: float
    ) -> None:
        """When the replica is to stop, its requests have `drain_s` to finish."""
        bind_calls_to_node_address()
        self._id = str(serve.get_replica_context().replica_id.unique_id)
        self._host = ray.util.get_node_ip_address()
        runner = build_runner(model_dir, config)  # first: it sets up the process before torch is imported
        limits = resolve_limits(config, Tokenizer.load(model_dir).facts, runner)
        self._clock = WallClock()
        self._drain_s = drain_s
        profile = config.multiplex.profile
        self._costs = load_costs(Path(profile).expanduser(), model_dir, runner) if profile and limits.has_lanes else None
        self._engine = Engine(runner, limits, self._publish, self._clock, costs=self._costs)
        log.info("Instance %s: %s", self._id, _resolved(config, runner, self._engine.limits))
        _favour_the_step_loop()
        self._switchboard = Switchboard(self)
        self._engine.start()
        await self._switchboard.open(self._host)

    async def describe(self) -> dict[str, Any]:
        """Who this is, how it is reached, and what is wrong with it. Gateways call it all the time."""
        limits = self._engine.limits
        return {
            "instance_id": self._id,
            "address": (self._host, self._switchboard.port, self._switchboard.token),
            "context_length": limits.context_length,
            "vocab_size": limits.vocab_size,
            "max_waiting": limits.max_waiting,
            "ailing": self._engine.defect() is not None,  # a stall shows in the load figures, and so does its end
        }

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises several times in a row."""
        problem = self._engine.problem()
        if problem is not None:
            raise PdmuxError(problem)

    def submit(self, sink: str, submission: wire.Submission) -> wire.Refusal | None:
        """All of them or none."""
        accepted: list[str] = []
        try:
            for new in wire.unpack_submission(submission, sink, self._clock.now()):
                self._engine.submit(new)
                accepted.append(new.request_id)
        except PdmuxError as error:
            self._engine.abort(accepted)
            return wire.pack_refusal(self._for_clients(error))
        return None

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)

    def load(self) -> wire.PackedLoad:
        return wire.pack_load(self._engine.load())

    def figures(self) -> wire.Figures:
        counted = self._engine.counters.figures()
        return {**counted, **self._costs.figures().exported()} if self._costs else counted

    def timeline(self, first: int, seconds: float) -> wire.TimelinePage:
        ring, now_s = self._engine.timeline, self._clock.now()
        records = ring.since(first, now_s - seconds)
        return {"now_s": now_s, "units": ring.units, "records": records, "more": len(records) == PAGE}

    async def __del__(self) -> None:
        """Awaited by Serve when the replica is to stop."""
        if hasattr(self, "_switchboard"):  # not when the constructor failed
            await self._switchboard.drain(self._drain_s)
            await asyncio.to_thread(self._engine.close)
            self._switchboard.close()

    def _for_clients(self, error: PdmuxError) -> PdmuxError:
        """What is wrong inside stays in this log."""
        if not isinstance(error, InstanceUnavailableError):
            return error
        log.warning("A request is refused: %s", error)
        return InstanceUnavailableError("The instance takes no requests now. Send the request again.")

    def _publish(self, sink: str, events: list[TokenEvent]) -> None:
        """In the engine's thread."""
        self._switchboard.deliver(sink, [wire.pack_event(event) for event in events])


def _resolved(config: EngineConfig, runner: Runner, limits: EngineLimits) -> str:
    """What every "auto" and every limit came to."""
    device = {name: getattr(runner, name) for name in ("dtype", "threads", "kernels") if hasattr(runner, name)}
    words = [f"device {'cpu' if config.device == 'auto' else config.device}", *(f"{k} {v}" for k, v in device.items())]
    words += [f"mode {limits.mode.value}", f"context {limits.context_length} tokens"]
    return ", ".join([*words, f"KV pool {runner.pages} pages of {runner.page_size}: {runner.pages * runner.page_size} tokens"])


def _favour_the_step_loop() -> None:
    """The step loop's thread shares this process, and so the interpreter lock, with the replica's event loop.

    Python makes a thread wait up to the switch interval (5 ms unless set) for a lock that another one holds: about a third of a
    decode step. And the garbage collector need not look at the libraries and weights again: they stay.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
