"""Calls to one chosen replica. The only module that touches Serve's alpha API for request routers.

Why: a gateway chooses the instance by fresh load figures and keeps a stream to each, so it must be able to say *which* replica
a call is for. Serve's public handles cannot (`choose_replica` chooses by itself); a request router can.
"""

from __future__ import annotations

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pdmux_ray.errors import InstanceUnavailableError


def own_replica_id() -> str:
    """The id under which `PinnedRouter` finds the replica that calls this. To be called in a replica."""
    return str(serve.get_replica_context().replica_id.unique_id)


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # ray ships no types that mypy follows
    """Sends a call with the keyword `instance` to the replica of that id, and one without it to any.

    A call for a replica that is gone fails with InstanceUnavailableError; left alone it would be retried for ever.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.kwargs.get("instance") if pending_request is not None else None
        if pending_request is None or wanted is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or the base class spins while the replica is busy
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        if not chosen and not pending_request.future.done():
            pending_request.future.set_exception(InstanceUnavailableError(f"Instance {wanted} is gone."))
        return [chosen or candidate_replicas]  # never empty: only then does the base class look at the future again


ROUTER = RequestRouterConfig(request_router_class=PinnedRouter)
