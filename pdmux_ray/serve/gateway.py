"""The HTTP front as a Serve deployment: CPU only, several replicas, each with its own links to every instance."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.catalog import GatewayMetrics
from pdmux_ray.serve.completions import Completions, ModelCard, model_list
from pdmux_ray.serve.http import build_http_app
from pdmux_ray.serve.links import Links
from pdmux_ray.serve.node_address import bind_calls_to_node_address
from pdmux_ray.serve.router import Router, RouterSettings
from pdmux_ray.serve.timelines import trace_json
from pdmux_ray.text.tokenizer import Tokenizer

log = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway:
    """Deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the links need the replica's event loop
        self, instances: Sequence[DeploymentHandle], model: ModelCard, config: GatewayConfig, router: RouterSettings
    ) -> None:
        """`instances`: the deployments whose replicas they are."""
        bind_calls_to_node_address()
        gateway_id = uuid.uuid4().hex[:12]
        self.api_keys = _api_keys(config.api_keys_env)
        self.max_body_bytes = config.max_body_bytes
        self._model = model
        self._links = Links(partial(_describe_all, instances), gateway_id, config.discovery_period_s, Router(router))
        self._metrics = GatewayMetrics(gateway_id, self._links.loads, self._links.figures)
        tokenizer = Tokenizer.load(await asyncio.to_thread(model.files.here))
        self._completions = Completions(model, config, tokenizer, self._links, self._metrics)
        self._links.start()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self)

    async def chat(self, raw: bytes) -> Response:
        return await self._completions.chat(raw)

    async def complete(self, raw: bytes) -> Response:
        return await self._completions.complete(raw)

    def models(self) -> list[dict[str, Any]]:
        return model_list(self._model, self._links.context_length())

    def health(self) -> tuple[bool, dict[str, str]]:
        return self._links.open(), self._links.troubles()

    def exposition(self) -> bytes:
        return self._metrics.exposition()

    def instances(self) -> list[dict[str, Any]]:
        return self._links.listing()

    async def assign(self, instance: str, role: str) -> None:
        await self._links.assign(instance, role)

    async def timeline(self, instance: str | None, seconds: float) -> bytes:
        return await trace_json(self._links.by_id, instance, seconds)

    async def __del__(self) -> None:
        if hasattr(self, "_links"):  # not when the constructor failed
            await self._links.close()


async def _describe_all(deployments: Sequence[DeploymentHandle], timeout_s: float) -> list[Any]:
    """What each instance says of itself; those that have not answered in time are left out."""
    answers = await asyncio.gather(*(_describe(each, timeout_s) for each in deployments), return_exceptions=True)
    for error in (answer for answer in answers if isinstance(answer, BaseException)):
        log.debug("Listing the instances of a deployment failed: %r", error)  # it has no replica yet, say
    return [each for answer in answers if not isinstance(answer, BaseException) for each in answer]


async def _describe(instances: DeploymentHandle, timeout_s: float) -> list[Any]:
    """Of one deployment.

    Not `results_async`, whose timeout gives up every answer because of one: a replica that hangs would hide all others.
    """
    async with asyncio.timeout(timeout_s):
        calls = await instances.broadcast("describe")._fetch_replica_results_async()
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    if not tasks:
        return []
    answered, hanging = await asyncio.wait(tasks, timeout=timeout_s)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    return [task.result() for task in answered if task.exception() is None]


def _api_keys(variable: str | None) -> frozenset[bytes]:
    """Keys are read here, in the replica, and never travel through a config. Raises ConfigError."""
    if variable is None:
        return frozenset()
    keys = frozenset(key.strip().encode() for key in os.environ.get(variable, "").split(",") if key.strip())
    if not keys:
        raise ConfigError(
            f"gateway.api_keys_env names {variable}, but that variable holds no key where the gateway runs. Set it "
            "(comma-separated keys) in the environment in which Ray is started."
        )
    return keys
