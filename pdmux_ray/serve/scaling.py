"""How many replicas the instances have: what the placement controller wants, as Serve's autoscaler is told it.

The controller's replica reports the number with `record_autoscaling_stats`; the application's `autoscaling_policy` hands it on
to the deployment of the instances. Delays and bounds are Serve's own (`placement.replicas`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from pdmux_ray.config import SCALING_POLICY
from pdmux_ray.config_placement import ReplicasConfig

CONTROLLER, INSTANCES = "Placement", "Instance"  # deployments
WANTED = "pdmux_wanted_instances"  # name of what the controller reports

log = logging.getLogger("ray.serve")


class FollowPlan:
    """The application's policy. A deployment that is not named keeps what it has: so does the fleet while nothing is known."""

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        wanted = _wanted(context for key, context in contexts.items() if key.name == CONTROLLER)
        found = {key: wanted for key in contexts if key.name == INSTANCES} if wanted is not None else {}
        return found, {}


def _wanted(controllers: Any) -> int | None:
    """By the newest report; None: there is none."""
    reports = [
        series[-1] for context in controllers for series in (context.raw_metrics or {}).get(WANTED, {}).values() if series
    ]
    return int(max(reports, key=lambda report: report.timestamp).value) if reports else None


def keep(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The policy of a deployment that only its application's may scale: without one nothing changes."""
    return context.target_num_replicas, {}


class KeepAndSay:
    """`keep`, of the instances. Serve asks it only where the application has no policy, so `placement.replicas` does nothing:
    its controller's log says so, once."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if not self._said:
            self._said = True
            log.error(
                "placement.replicas does nothing: the application %s has no autoscaling_policy. Add, beside its import_path: "
                'autoscaling_policy: {policy_function: "%s"}',
                context.app_name,
                SCALING_POLICY,
            )
        return keep(context)


def instances_between(config: ReplicasConfig, now: int) -> AutoscalingConfig:
    """Of the deployment of the instances. `now`: how many there are at first."""
    return AutoscalingConfig(
        min_replicas=config.min,
        max_replicas=config.max,
        initial_replicas=min(max(now, config.min), config.max),
        upscale_delay_s=config.up_s,
        downscale_delay_s=config.down_s,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:KeepAndSay"),
    )


def always_one() -> AutoscalingConfig:
    """Of the controller: it does not scale, but only who could reports anything."""
    return AutoscalingConfig(
        min_replicas=1, max_replicas=1, initial_replicas=1, policy=AutoscalingPolicy(policy_function=f"{__name__}:keep")
    )
