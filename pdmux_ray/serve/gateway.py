"""The HTTP front as a Serve deployment: CPU only, several replicas, each with its own links to every instance."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from pdmux_ray.config import GatewayConfig
from pdmux_ray.metrics.catalog import Component
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.serve.completions import Completions, ModelCard, model_list
from pdmux_ray.serve.discovery import describe_all
from pdmux_ray.serve.http import build_http_app
from pdmux_ray.serve.keys import api_keys
from pdmux_ray.serve.links import Links
from pdmux_ray.serve.mirror import OF_GATEWAY, Mirror
from pdmux_ray.serve.node_address import bind_calls_to_node_address
from pdmux_ray.serve.router import Router, RouterSettings
from pdmux_ray.serve.scrape_port import ScrapePort
from pdmux_ray.serve.timelines import trace_json
from pdmux_ray.serve.tracing import Headers, Trace, open_tracer
from pdmux_ray.text.tokenizer import Tokenizer

TARGETS_S = 1.0  # who has not said by then where its metrics are is left out of the list, but for instances with a line

log = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway:
    """Deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the links need the replica's event loop
        self,
        instances: Sequence[DeploymentHandle],
        model: ModelCard,
        config: GatewayConfig,
        router: RouterSettings,
        tiers: Mapping[str, Slo],
        controllers: Sequence[DeploymentHandle],
    ) -> None:
        """`instances`: the deployments whose replicas they are. `controllers`: others that have metrics."""
        bind_calls_to_node_address()
        context = serve.get_replica_context()
        self._id = gateway_id = uuid.uuid4().hex[:12]
        self._app = context.app_name
        # Whose replicas have a scrape port, too.
        self._scraped = [DeploymentHandle(context.deployment, context.app_name), *controllers]
        self.api_keys = api_keys(config.api_keys_env)
        self.max_body_bytes = config.max_body_bytes
        self._model = model
        self._tracer = open_tracer(config.tracing, gateway_id, model.name)
        self._links = Links(partial(describe_all, instances), gateway_id, config.discovery_period_s, Router(router))
        self._metrics = GatewayMetrics(gateway_id, self._links.loads, self._links.figures, tiers, router.instances)
        self._scrape_port = ScrapePort(self._metrics.registry, ray.util.get_node_ip_address(), self.api_keys)
        self._mirror = Mirror(self._metrics.registry, OF_GATEWAY)
        tokenizer = Tokenizer.load(await asyncio.to_thread(model.files.here))
        self._completions = Completions(model, config, tokenizer, self._links, self._metrics)
        self._links.start()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self)

    async def chat(self, raw: bytes, trace: Trace) -> Response:
        return await self._completions.chat(raw, trace)

    async def complete(self, raw: bytes, trace: Trace) -> Response:
        return await self._completions.complete(raw, trace)

    def trace(self, path: str, headers: Headers) -> Trace:
        return self._tracer.begin(path, headers)

    def models(self) -> list[dict[str, Any]]:
        return model_list(self._model, self._links.context_length())

    def health(self) -> tuple[bool, dict[str, str]]:
        return self._links.open(), self._links.troubles()

    def exposition(self) -> bytes:
        return self._metrics.exposition()

    async def describe(self) -> dict[str, str]:
        """Asked by the application's gateways, for `targets`."""
        return {"id": self._id, "component": Component.GATEWAY, "metrics_address": self._scrape_port.address}

    async def targets(self) -> list[dict[str, Any]]:
        """In the form of Prometheus' HTTP service discovery. A process that has ended is not there any more. Raises
        InstanceUnavailableError when the list would lack instances because this gateway has just begun: Prometheus then keeps
        the list that it has."""
        others, instances = await asyncio.gather(
            describe_all(self._scraped, TARGETS_S), self._links.metrics_addresses(TARGETS_S)
        )
        told = {each["id"]: each for each in [await self.describe(), *others]}
        found = [(each["id"], each["component"], each["metrics_address"]) for each in told.values()]
        found += [(name, Component.INSTANCE, address) for name, address in instances.items()]
        same = {"app": self._app, "model": self._model.name}
        return [
            {"targets": [address], "labels": {"instance": name, "component": component, **same}}
            for name, component, address in found
        ]

    def instances(self) -> list[dict[str, Any]]:
        return self._links.listing()

    async def assign(self, instance: str, role: str) -> None:
        await self._links.assign(instance, role)

    async def timeline(self, instance: str | None, seconds: float) -> bytes:
        return await trace_json(self._links.by_id, instance, seconds)

    async def __del__(self) -> None:
        if hasattr(self, "_mirror"):  # not when the constructor failed
            await self._links.close()
            self._mirror.close()
            await asyncio.to_thread(self._scrape_port.close)
            await asyncio.to_thread(self._tracer.close)
