"""One engine as a Serve replica: its step loop in a thread of its own, a line to every gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ReplicaRank

from pdmux_ray.clock import WallClock
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner, limit_spinning
from pdmux_ray.device.cpu.cores import own_cores
from pdmux_ray.engine.counters import unit_figures
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import EngineLimits, resolve_limits
from pdmux_ray.engine.runner import LaneRunner, Runner
from pdmux_ray.engine.timeline import PAGE
from pdmux_ray.errors import InstanceUnavailableError, PdmuxError, RequestError
from pdmux_ray.latency.loading import load_costs
from pdmux_ray.metrics.catalog import Component
from pdmux_ray.metrics.exporter import load_figures, registry_of, step_histograms
from pdmux_ray.model.source import ModelFiles
from pdmux_ray.serve import wire
from pdmux_ray.serve.channel import Switchboard
from pdmux_ray.serve.keys import api_keys
from pdmux_ray.serve.mirror import OF_INSTANCE, Mirror
from pdmux_ray.serve.node_address import bind_calls_to_node_address
from pdmux_ray.serve.peers import Peers, Pooled, Who, model_digest, open_peers
from pdmux_ray.serve.router import one_pass_tokens
from pdmux_ray.serve.scrape_port import ScrapePort
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import Role, TokenEvent

log = logging.getLogger("ray.serve")


class Instance:
    """Deployment. Everything but `_publish` runs on the replica's event loop, and nothing there waits for the engine."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ModelFiles,
        config: EngineConfig,
        drain_s: float,
        roles: Sequence[Role],
        neighbours: int,
        secret: str | None,
        api_keys_env: str | None,
    ) -> None:
        """When the replica is to stop, its requests have `drain_s` to finish. `roles`: by rank. `neighbours`: so many instances
        of other deployments may be on this machine. `secret`: of the fleet, between whose instances KV may go; None: each is
        by itself. `api_keys_env`: with the keys that its metrics ask for."""
        bind_calls_to_node_address()
        keys = api_keys(api_keys_env)  # before the model: what is wrong with them shows at once
        limit_spinning()  # to prepare a model imports torch
        model_dir = await asyncio.to_thread(model.here)
        context = serve.get_replica_context()
        self._id = str(context.replica_id.unique_id)
        self._host = ray.util.get_node_ip_address()
        self._roles = roles
        self._neighbours = neighbours
        self._rank = neighbours + context.rank.rank  # of the topology's instances
        self._role = self._first_role = self._role_of(context.rank)
        self._role_changes = 0
        with own_cores(neighbours + context.rank.local_rank, config.threads):
            runner = build_runner(model_dir, config)
        facts = Tokenizer.load(model_dir).facts
        limits = resolve_limits(config, facts, runner)
        self._clock = WallClock()
        self._config = config
        self._drain_s = drain_s
        profile = config.multiplex.profile
        needed = limits.has_lanes or secret is not None  # gateways predict with it, too, where there is a topology
        self._costs = load_costs(Path(profile).expanduser(), model_dir, runner) if profile and needed else None
        self._peers: Peers | None = None
        if secret is not None:
            who = Who(self._id, self._host, model_digest(model_dir, config.load), secret)
            self._peers = await asyncio.to_thread(open_peers, who, runner, facts, config.transfer)
        port = self._peers.port if self._peers else None
        self._engine = Engine(runner, limits, self._publish, self._clock, costs=self._costs, port=port)
        self._device, self._units = _device(config, runner), unit_figures(runner)
        log.info("Instance %s: %s", self._id, _resolved(config, runner, self._engine.limits))
        _favour_the_step_loop()
        self._switchboard = Switchboard(self)
        self._engine.start()
        await self._switchboard.open(self._host)
        self._open_metrics(keys)

    async def reconfigure(self, user_config: object, rank: ReplicaRank) -> None:
        """Called by Serve, also when it gives ranks anew: who replaces one that takes long to end begins with a rank behind all
        others. The role follows, unless the instance was given another one meanwhile."""
        self._rank = self._neighbours + rank.rank
        first = self._role_of(rank)
        if self._role is self._first_role:
            self._take(first)
        self._first_role = first

    def _open_metrics(self, keys: Collection[bytes]) -> None:
        registry = registry_of(Component.INSTANCE, self._exported, step_histograms(self._engine.timeline.times))
        self._scrape_port = ScrapePort(registry, self._host, keys)
        self._mirror = Mirror(registry, OF_INSTANCE)

    def _take(self, role: Role) -> None:
        self._role_changes += role is not self._role
        self._role = role

    def _role_of(self, rank: ReplicaRank) -> Role:
        place: int = rank.rank
        return self._roles[min(place, len(self._roles) - 1)]

    async def describe(self) -> dict[str, Any]:
        """Who this is, how it is reached, and what is wrong with it. Gateways call it all the time."""
        limits = self._engine.limits
        return {
            "instance_id": self._id,
            "rank": self._rank,
            "address": (self._host, self._switchboard.port, self._switchboard.token),
            "context_length": limits.context_length,
            "vocab_size": limits.vocab_size,
            "max_waiting": limits.max_waiting,
            "ailing": self._engine.defect() is not None,  # a stall shows in the load figures, and so does its end
            "kv_address": self._peers.address if self._peers else None,
            "metrics_address": self._scrape_port.address,
            **self._device,
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
            for new in wire.unpack_submission(submission, sink, self._clock.now(), self._config.transfer.fetch_s):
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
        """From any thread."""
        predicted = self._costs.figures().exported() if self._costs else {}
        moved = self._peers.figures() if self._peers else {}
        role: wire.Figures = {
            "pdmux_role": {role.value: float(role is self._role) for role in Role},
            "pdmux_role_changes_total": self._role_changes,
        }
        return {**self._engine.figures(), **self._units, **predicted, **moved, **role}

    def _exported(self) -> wire.Figures:
        """With the load, which goes to gateways with every step."""
        return {**load_figures(self._engine.load()), **self.figures()}

    def timeline(self, first: int, seconds: float) -> wire.TimelinePage:
        ring, now_s = self._engine.timeline, self._clock.now()
        records = ring.since(first, now_s - seconds)
        lessons = self._costs.lessons() if self._costs else []
        return {"now_s": now_s, "units": ring.units, "records": records, "more": len(records) == PAGE, "lessons": lessons}

    def standing(self) -> wire.PackedStanding:
        return (self._role.value, self._peers.linked() if self._peers else [])

    def assume(self, role: str) -> wire.Refusal | None:
        """Requests that run go on, and weights and cached prefixes stay: a role only says what this instance is given."""
        if self._peers is None:
            return wire.pack_refusal(
                RequestError("This server has no topology: KV cannot go between its instances, so all are in role mux.", "role")
            )
        if role not in {known.value for known in Role}:
            return wire.pack_refusal(RequestError(f"{role!r} is no role. There are mux, prefill and decode.", "role"))
        log.info("Instance %s: role %s, before %s", self._id, role, self._role.value)
        self._take(Role(role))
        return None

    def meet(self, peers: Mapping[str, str]) -> None:
        if self._peers is not None:
            self._peers.meet({peer: address for peer, address in peers.items() if peer != self._id})

    async def __del__(self) -> None:
        """Awaited by Serve when the replica is to stop."""
        if hasattr(self, "_mirror"):  # not when the constructor failed
            end_s = time.monotonic() + self._drain_s
            await self._switchboard.drain(self._drain_s)
            if self._peers is not None:
                await asyncio.to_thread(self._peers.close, end_s - time.monotonic())
            await asyncio.to_thread(self._engine.close)
            self._switchboard.close()
            self._mirror.close()
            await asyncio.to_thread(self._scrape_port.close)

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
    words = [f"device {getattr(runner, 'device', config.device)}", *(f"{k} {v}" for k, v in device.items())]
    words += [f"mode {limits.mode.value}", f"context {limits.context_length} tokens"]
    return ", ".join([*words, f"KV pool {runner.pages} pages of {runner.page_size}: {runner.pages * runner.page_size} tokens"])


def _device(config: EngineConfig, runner: Runner) -> dict[str, Any]:
    """What gateways predict with, where they have a latency model. See `policy.views.InstanceCosts`."""
    lanes = runner if isinstance(runner, LaneRunner) else None
    pool = runner.layout if isinstance(runner, Pooled) else None
    return {
        "layers": lanes.layers if lanes else 1,
        "units": lanes.units if lanes else 1,
        "one_pass_tokens": one_pass_tokens(config),
        "page_size": runner.page_size,
        "kv_bytes_per_token": pool.layers * 2 * pool.kv_heads * pool.head_dim * pool.dtype_bytes if pool else 0,
    }


def _favour_the_step_loop() -> None:
    """The step loop's thread shares this process, and so the interpreter lock, with the replica's event loop.

    Python makes a thread wait up to the switch interval (5 ms unless set) for a lock that another one holds: about a third of a
    decode step. And the garbage collector need not look at the libraries and weights again: they stay.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
