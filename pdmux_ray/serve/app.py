"""The Serve application: `import_path: pdmux_ray.serve.app:build_app`."""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate a config file's `args:`, and
# does not resolve strings.

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from pdmux_ray.config import AppConfig, require_profile
from pdmux_ray.device.gpus import wants_gpu
from pdmux_ray.errors import ConfigError
from pdmux_ray.metrics.tiers import tiers_of
from pdmux_ray.model.source import ModelFiles
from pdmux_ray.serve.completions import ModelCard
from pdmux_ray.serve.controller import Placement
from pdmux_ray.serve.gateway import Gateway
from pdmux_ray.serve.instance import Instance
from pdmux_ray.serve.router import RouterSettings
from pdmux_ray.serve.scaling import CONTROLLER, always_one, instances_between

# Serve's own limits stay out of the way: the engine's queue is the one that is full (429), and it knows why.
MAX_ONGOING_REQUESTS = 10_000

# A replica that is to stop lets its requests finish: for as long as one may take, but no longer than this.
MAX_DRAIN_S = 120.0
_SHUTDOWN_MARGIN_S = 5.0

# A replica that misses three checks in a row is replaced, and killed when it does not end by itself: so one that is frozen for
# ever does not keep the right to write into the memory of others for ever.
HEALTH_CHECK_PERIOD_S = 10.0
HEALTH_CHECK_TIMEOUT_S = 30.0


def build_app(args: AppConfig) -> serve.Application:
    """Prepares the model's files once, before any replica starts on this node. An unknown key in `args` is an error that names
    it."""
    require_profile(args)
    files = ModelFiles.of(args.model, weights=args.engine.reads_weights)
    card = ModelCard(args.model_name, files, int(time.time()))
    # An instance drains, then Engine.close waits up to stall_timeout_s for the step under way; only then may Serve kill it.
    # A gateway's requests are waited for by Serve itself. (scripts/serve, which ends all of it, waits STOP_GRACE_S.)
    drain_s = min(args.gateway.request_timeout_s, MAX_DRAIN_S)
    share: dict[str, float] = {"num_cpus": 0 if args.engine.device == "fake" else args.cpus_per_instance}
    if wants_gpu(args.engine):
        share["num_gpus"] = 1  # from who asks for none Ray hides them
    template = serve.deployment(
        Instance,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        logging_config=LoggingConfig(enable_access_log=False),  # a line per discovery round and gateway would say nothing
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_s + args.engine.stall_timeout_s + _SHUTDOWN_MARGIN_S,
    )
    secret, instances, neighbours = _secret(args), [], 0
    for group in args.groups:
        options = {**_count(args, len(group.roles)), "ray_actor_options": share | group.ray_actor_options}
        deployment = template.options(name=group.name, **options)
        keys_env = args.gateway.api_keys_env
        instances.append(deployment.bind(files, args.engine, drain_s, group.roles, neighbours, secret, keys_env))
        neighbours += len(group.roles)
    return serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=args.gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},  # waits more than it computes, and must fit beside an instance on a small machine
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_s + _SHUTDOWN_MARGIN_S,
    ).bind(instances, card, args.gateway, RouterSettings.of(args), tiers_of(args), _controllers(args, instances))


def _count(args: AppConfig, instances: int) -> dict[str, Any]:
    """How many replicas a deployment of instances has: so many, or as the placement wants."""
    replicas = args.placement.replicas if args.placement.enabled else None
    return {"num_replicas": instances} if replicas is None else {"autoscaling_config": instances_between(replicas, instances)}


def _controllers(args: AppConfig, instances: Sequence[serve.Application]) -> list[serve.Application]:
    if not args.placement.enabled:
        return []
    deployment = serve.deployment(
        Placement,
        name=CONTROLLER,
        autoscaling_config=always_one(),
        ray_actor_options={"num_cpus": 0},  # it looks once a second
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
    )
    return [deployment.bind(instances, args)]


def _secret(args: AppConfig) -> str | None:
    """Of this application's instances, between which KV may go. One that is made here lives as long as the application."""
    if args.topology is None:
        return None
    variable = args.engine.transfer.secret_env
    if variable is None:
        return secrets.token_urlsafe(32)
    secret = os.environ.get(variable, "")
    if not secret:
        raise ConfigError(
            f"engine.transfer.secret_env names {variable}, but that variable is empty where the application is built. Set it "
            "in the environment in which Ray is started, on every node."
        )
    return secret
