"""Keeps Serve's port for calls between replicas on the node's own address. The only module that changes Serve itself.

Why: Serve opens that port on every interface and has no setting for it, and what it reads there are pickles, so whoever can
reach it can run code. On the node's address the other nodes of a cluster still reach it; `scripts/serve` makes that address
loopback.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica


def bind_calls_to_node_address() -> None:
    """To be called in a replica's constructor: Serve opens the port after it."""
    bind, host = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    host = f"[{host}]" if ":" in host else host

    def bind_to_node_address(server: Any, address: str) -> Any:
        return bind(server, address.replace("[::]", host))

    replica.add_port_to_grpc_server = bind_to_node_address
