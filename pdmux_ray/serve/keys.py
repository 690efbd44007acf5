"""API keys: where they come from, and whether a request has one. Knows nothing of HTTP but the header's form."""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection

from pdmux_ray.errors import ConfigError


def api_keys(variable: str | None) -> frozenset[bytes]:
    """Of `gateway.api_keys_env`; empty: none is asked for. They are read in the replica and never travel through a config.
    Raises ConfigError."""
    if variable is None:
        return frozenset()
    keys = frozenset(key.strip().encode() for key in os.environ.get(variable, "").split(",") if key.strip())
    if not keys:
        raise ConfigError(
            f"gateway.api_keys_env names {variable}, but that variable holds no key where a gateway or an instance runs. Set "
            "it (comma-separated keys) in the environment in which Ray is started, on every node."
        )
    return keys


def allowed(keys: Collection[bytes], authorization: str) -> bool:
    """Whether the `Authorization` header (empty: there is none) names one of the keys, if there are any."""
    if not keys:
        return True
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("latin-1")
    # Every key is compared, in constant time, so that the time taken tells nothing.
    return scheme.lower() == "bearer" and bool(sum(hmac.compare_digest(given, key) for key in keys))
