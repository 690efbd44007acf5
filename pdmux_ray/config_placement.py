"""The keys under `placement:`: who sees the cluster, what it may do, and how sure it must be. See docs/placement.md."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from pdmux_ray.config_base import FROZEN, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pdmux_ray.types import Role


class _Frozen(BaseModel):
    model_config = FROZEN


class PrometheusConfig(_Frozen):
    """A Prometheus that scrapes the replicas and evaluates dashboards/rules.yaml."""

    url: Annotated[str, Field(pattern="^https?://[^/]")]  # such as http://127.0.0.1:9090
    timeout_s: Annotated[float, Field(gt=0, le=15)] = 2.0  # of a query; a controller whose look takes 30 s is replaced


class BoundsConfig(_Frozen):
    """How many instances there may be. Both included; max None: no limit."""

    min: NonNegativeInt | None = None  # None: 1; 0 of role prefill where the topology has none
    max: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max is not None and self.min is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is less than min ({self.min})")
        return self


class ReplicasConfig(_Frozen):
    """How many instances there may be in all. The Serve config file's application then has
    `autoscaling_policy: {policy_function: "pdmux_ray.serve.scaling:FollowPlan"}`."""

    min: PositiveInt
    max: PositiveInt
    up_s: NonNegativeFloat = 30.0  # for so long more must be wanted
    down_s: NonNegativeFloat = 600.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is less than min ({self.min})")
        return self


class PlacementConfig(_Frozen):
    """The placement controller, of an application with a topology."""

    enabled: bool = False
    dry_run: bool = False  # it says what it would do, in its log and metrics, and does nothing
    period_s: PositiveFloat = 1.0  # between two looks
    prometheus: PrometheusConfig | None = None  # None: the figures come from the instances themselves
    # Of an instance, by its rank ("0" is the first of the topology) or the beginning of its id: the role that it keeps.
    pinned: dict[Annotated[str, Field(min_length=1)], Role] = {}
    prefill: BoundsConfig = BoundsConfig()  # instances in role prefill
    decode: BoundsConfig = BoundsConfig()  # instances in role mux or decode
    replicas: ReplicasConfig | None = None  # None: as many as the topology says
    # The busier side's share of time. Below it roles stay as they are, and there are instances enough.
    busy: Annotated[float, Field(gt=0, le=1)] = 0.6
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.2  # another ratio must be less busy by this part of it
    confirm_s: NonNegativeFloat = 5.0  # for so long
    cool_down_s: NonNegativeFloat = 20.0  # between a change and one that goes back; and after the begin
    stale_s: PositiveFloat = 15.0  # older figures count as none

    def check(self, instances: int) -> None:
        """`instances`: of the topology. Raises ValueError for what so many could never keep."""
        if self.replicas is not None:  # there may be more
            return
        ranks = [str(rank) for rank in range(instances)]
        if unknown := [key for key in self.pinned if key.isdecimal() and key not in ranks]:
            raise ValueError(f"placement.pinned: {unknown[0]!r} is no rank: {instances} instances have 0 to {instances - 1}")
        if all(self.pinned.get(rank) is Role.PREFILL for rank in ranks):
            raise ValueError("placement.pinned: all instances prefill, so none decodes: leave one out")
        least = (self.prefill.min or 0) + max(self.decode.min or 0, 1)  # one decodes at least
        if least > instances:
            raise ValueError(f"placement: prefill.min and decode.min need {least} instances, and there are {instances}")
