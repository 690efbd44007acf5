"""The placement controller as a Serve deployment: one replica, with a line to every instance as a gateway has.

What it plans is not kept anywhere: instances keep their roles, so that a controller which begins anew goes on from those.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from pdmux_ray.config import AppConfig
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.metrics.catalog import Component
from pdmux_ray.metrics.exporter import Figures, registry_of
from pdmux_ray.metrics.prometheus import Prometheus
from pdmux_ray.policy.demand import FleetFigures
from pdmux_ray.serve.discovery import describe_all
from pdmux_ray.serve.keys import api_keys
from pdmux_ray.serve.links import Links
from pdmux_ray.serve.node_address import bind_calls_to_node_address
from pdmux_ray.serve.placer import PATIENCE_S, Placer
from pdmux_ray.serve.router import Router, RouterSettings, model_of
from pdmux_ray.serve.scaling import WANTED
from pdmux_ray.serve.scrape_port import ScrapePort
from pdmux_ray.serve.sources import PrometheusSource, Window

HUNG_S = 30.0  # a look that takes longer makes the replica unhealthy: Serve replaces it

log = logging.getLogger("ray.serve")


class Placement:
    """Deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the links need the replica's event loop
        self, instances: Sequence[DeploymentHandle], config: AppConfig
    ) -> None:
        """`instances`: the deployments whose replicas they are. Raises ConfigError for a latency model that cannot be read."""
        bind_calls_to_node_address()
        self._settings = config.placement
        model = model_of(config.engine)
        if model is None:
            raise ConfigError("placement knows what instances can do by predicted times: name engine.multiplex.profile.")
        self._id = f"placement-{uuid.uuid4().hex[:12]}"
        router, period_s = Router(RouterSettings.of(config)), config.gateway.discovery_period_s
        self._links = Links(partial(describe_all, instances), self._id, period_s, router)
        self._placer = Placer(config, model, time.monotonic())
        self._window = Window()
        self._prometheus: PrometheusSource | None = None
        if self._settings.prometheus is not None:
            server = Prometheus(self._settings.prometheus.url, self._settings.prometheus.timeout_s)
            self._prometheus = PrometheusSource(server, serve.get_replica_context().app_name)
        self._looked_s = time.monotonic()
        registry = registry_of(Component.CONTROLLER, self._exported)
        self._scrape_port = ScrapePort(registry, ray.util.get_node_ip_address(), api_keys(config.gateway.api_keys_env))
        self._links.start()
        self._looking = asyncio.create_task(self._look_for_ever())

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises several times in a row."""
        if self._looking.done():
            raise PdmuxError(f"the controller looks at nothing any more: {self._looking.exception()!r}")
        if (since_s := time.monotonic() - self._looked_s) > HUNG_S + self._settings.period_s:
            raise PdmuxError(f"the last look was {since_s:.0f} s ago")

    async def describe(self) -> dict[str, str]:
        """As a gateway's."""
        return {"id": self._id, "component": Component.CONTROLLER, "metrics_address": self._scrape_port.address}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, whose policy (`serve.scaling`) gets it."""
        return {} if self._placer.replicas is None else {WANTED: float(self._placer.replicas)}

    async def _look_for_ever(self) -> None:
        while True:
            await self._look()
            self._looked_s = time.monotonic()
            await asyncio.sleep(self._settings.period_s)

    async def _look(self) -> None:
        figures = await self._figures()
        plan = self._placer.look(time.monotonic(), self._links.seen(), figures)
        if self._settings.dry_run:
            return
        for instance_id, role in plan.changes:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._links.assign(instance_id, role.value)
            except (PdmuxError, TimeoutError) as error:  # it has just gone, say: the next look sees what is left
                log.warning("Placement: instance %s did not take role %s: %r", instance_id, role.value, error)
                self._placer.refused(instance_id)

    async def _figures(self) -> FleetFigures | None:
        now, seen = time.monotonic(), self._links.seen()
        if self._prometheus is not None:
            return await self._prometheus.take(now, sum(each.fit for each in seen))
        return self._window.take(now, seen)

    def _exported(self) -> Figures:
        return self._placer.figures(time.monotonic())

    async def __del__(self) -> None:
        if hasattr(self, "_looking"):  # not when the constructor failed
            self._looking.cancel()
            await self._links.close()
            await asyncio.to_thread(self._scrape_port.close)
