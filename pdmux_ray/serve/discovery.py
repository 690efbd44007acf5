"""What the replicas of deployments say of themselves, over Serve's handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")


async def describe_all(deployments: Sequence[DeploymentHandle], timeout_s: float) -> list[Any]:
    """What each replica says of itself; those that have not answered in time are left out."""
    answers = await asyncio.gather(*(_describe(each, timeout_s) for each in deployments), return_exceptions=True)
    for error in (answer for answer in answers if isinstance(answer, BaseException)):
        log.debug("Listing the replicas of a deployment failed: %r", error)  # it has none yet, say
    return [each for answer in answers if not isinstance(answer, BaseException) for each in answer]


async def _describe(replicas: DeploymentHandle, timeout_s: float) -> list[Any]:
    """Of one deployment.

    Not `results_async`, whose timeout gives up every answer because of one: a replica that hangs would hide all others.
    """
    async with asyncio.timeout(timeout_s):
        calls = await replicas.broadcast("describe")._fetch_replica_results_async()
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    if not tasks:
        return []
    answered, hanging = await asyncio.wait(tasks, timeout=timeout_s)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    return [task.result() for task in answered if task.exception() is None]
