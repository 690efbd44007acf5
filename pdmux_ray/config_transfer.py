"""The keys under `engine.transfer:`."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, model_validator

from pdmux_ray.config_base import FROZEN, PositiveFloat


class TransferConfig(BaseModel):
    """KV from one instance to another, in an application with a topology. Times are patience, not how long a transfer takes."""

    model_config = FROZEN

    secret_env: str | None = None  # environment variable with the secret that all instances share; None: made at the start
    checksum: bool | None = None  # of all that lands; None: where KV is in host memory, and it can be nowhere else
    fetch_s: PositiveFloat = 30.0  # a request waits for its KV so long, then it is prefilled where it decodes
    heartbeat_s: PositiveFloat = 0.25  # between two words of an instance to each peer
    silence_s: PositiveFloat = 2.0  # a peer without a word for so long counts as frozen or cut off
    accept_s: PositiveFloat = 1.0  # until a peer has said that it will prefill
    lease_s: PositiveFloat = 5.0  # since a peer last said that it still works on a prefill
    drain_s: PositiveFloat = 1.0  # for the writes of a transfer that was given up to end by themselves

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"silence_s ({self.silence_s:g}) is shorter than two heartbeats ({self.heartbeat_s:g} s each): every peer "
                "would count as frozen. Raise silence_s or lower heartbeat_s"
            )
        for name in ("lease_s", "drain_s"):
            if getattr(self, name) <= self.heartbeat_s:
                raise ValueError(
                    f"{name} ({getattr(self, name):g}) is not longer than heartbeat_s ({self.heartbeat_s:g}), by which peers "
                    f"say that they are at work: raise {name} or lower heartbeat_s"
                )
        return self
